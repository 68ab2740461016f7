# SPDX-License-Identifier: Apache-2.0
"""Conan 2: `conan create cmake/ports/conan --build=missing` in a clone."""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load, rmdir


class Kvkeep(ConanFile):
    name = "kvkeep"
    description = "Decides which entries of an LLM's key-value cache stay, and moves them"
    license = "Apache-2.0"
    topics = ("llm", "kv-cache")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "fPIC": [True, False], "folding": [True, False], "files": [True, False]}
    default_options = {"shared": False, "fPIC": True, "folding": True, "files": True}
    implements = ["auto_shared_fpic"]

    def _top(self):
        return os.path.join(self.recipe_folder, "..", "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._top(), "CMakeLists.txt"))
        self.version = re.search(r"project\(kvkeep VERSION ([0-9.]+)", text).group(1)

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, self._top(), self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("highway/[>=1.0 <2]", transitive_headers=True)
        if self.options.folding:
            self.requires("eigen/[>=3.4 <4]", transitive_headers=True)
        if self.options.files:
            self.requires("nlohmann_json/[>=3.10 <4]")

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False  # nothing beside the sources
        toolchain.cache_variables["KVKEEP_TORCH"] = False
        toolchain.cache_variables["KVKEEP_BUILD_CLI"] = False
        toolchain.cache_variables["KVKEEP_BUILD_TESTS"] = False
        toolchain.cache_variables["KVKEEP_FOLDING"] = bool(self.options.folding)
        toolchain.cache_variables["KVKEEP_FILES"] = bool(self.options.files)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        CMake(self).install()
        rmdir(self, os.path.join(self.package_folder, "lib", "cmake"))
        rmdir(self, os.path.join(self.package_folder, "lib", "pkgconfig"))

    def package_info(self):
        self.cpp_info.libs = ["kvkeep"]
        self.cpp_info.set_property("cmake_target_name", "kvkeep::kvkeep")
        self.cpp_info.set_property("pkg_config_name", "kvkeep")
        for part in ("folding", "files"):
            if not self.options.get_safe(part):
                self.cpp_info.defines.append(f"KVKEEP_{part.upper()}=0")
        if self.settings.os == "Linux":
            self.cpp_info.system_libs = ["pthread", "m"]
