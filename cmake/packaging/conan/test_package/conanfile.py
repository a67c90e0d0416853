"""A project that uses the package: finds it with CMake, compiles the consumer of the tests, runs it."""

import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class MdkvTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # nothing is written beside this file
        toolchain.cache_variables["MDKV_EXPECTED_VERSION"] = str(self.dependencies["mdkv"].ref.version)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        if can_run(self):
            version = self.dependencies["mdkv"].ref.version
            self.run(f"{os.path.join(self.cpp.build.bindir, 'consumer')} {version}", env="conanrun")
