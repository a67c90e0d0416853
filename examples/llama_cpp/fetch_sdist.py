"""Downloads a source package of Python as pip would, without making its metadata, which compiles llama.cpp.

    fetch_sdist.py FOLDER NAME VERSION

pip's own settings (index, certificates, proxies) hold. The caller checks the hash.
"""

import sys

from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.specifiers import SpecifierSet

folder, name, version = sys.argv[1:]
command = DownloadCommand("download", "")
with command.main_context():
    options, _ = command.parse_args(["--no-binary", name, name])
    session = command.get_default_session(options)
    found = command._build_package_finder(options, session).find_best_candidate(name, SpecifierSet(f"=={version}"))
    if found.best_candidate is None:
        sys.exit(f"the index has no {name} {version}")
    link = found.best_candidate.link
    answer = session.get(link.url_without_fragment)
    answer.raise_for_status()
    with open(f"{folder}/{link.filename}", "wb") as file:
        file.write(answer.content)
