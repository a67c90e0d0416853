"""Conan 2 recipe: packs the checkout that it lies in. From the repository's root: conan create cmake/packaging/conan"""

import re
from pathlib import Path

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load

REQUIRED = {"gcc": "12", "clang": "16"}  # the compilers that the tests run with


class MdkvRecipe(ConanFile):
    name = "mdkv"
    description = "Compresses the KV cache of a language model to a byte budget, header-only C++20"
    license = "Apache-2.0"
    topics = ("kv-cache", "compression", "llm", "inference", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def _checkout(self):
        return Path(self.recipe_folder).parents[2]

    def set_version(self):
        header = load(self, self._checkout() / "include/mdkv/core/version.hpp")
        self.version = ".".join(re.findall(r"^#define MDKV_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.MULTILINE))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*"):
            copy(self, pattern, self._checkout(), self.export_sources_folder, excludes="cmake/packaging/*")

    def validate(self):
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 20)
        compiler = str(self.settings.compiler)
        if compiler not in REQUIRED:
            raise ConanInvalidConfiguration(f"mdkv is for {' and '.join(REQUIRED)}, not for {compiler}")
        if int(str(self.settings.compiler.version).split(".")[0]) < int(REQUIRED[compiler]):
            raise ConanInvalidConfiguration(f"mdkv needs {compiler} {REQUIRED[compiler]} or newer")

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "BENCH", "EXAMPLES"):
            toolchain.cache_variables[f"MDKV_BUILD_{part}"] = False
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")

    def package_id(self):
        self.info.clear()

    def package_info(self):
        # mdkv's own CMake package, which defines mdkv::mdkv and mdkv::cuda, instead of one that Conan would write.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/mdkv"]
        self.cpp_info.set_property("pkg_config_name", "mdkv")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.system_libs = ["pthread"]
