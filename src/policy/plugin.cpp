// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/policy/plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace kvkeep {
namespace {

constexpr const char* kAllowed = "; allowed a shared library with KVKEEP_PLUGIN() of kvkeep/policy/plugin.h";
constexpr std::string_view kOurs = KVKEEP_PLUGIN_MARK;

/// The version that a plug-in was compiled for, as its file says; empty: it is none. Nothing of it runs.
std::string version_in(std::string_view bytes) {
  const std::string_view begins = kOurs.substr(0, kOurs.size() - std::string_view(KVKEEP_VERSION ";").size());
  const std::size_t at = bytes.find(begins);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = bytes.substr(at + begins.size(), sizeof(Plugin::mark));
  return std::string(rest.substr(0, rest.find(';')));
}

/// The library, which stays in this process. Its constructors run.
const Plugin& opened(const std::filesystem::path& file) {
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* why = library == nullptr ? ::dlerror() : nullptr;
  KVKEEP_REQUIRE(library != nullptr, "load_plugin: the system cannot load ", file.string(), ": ",
                 why == nullptr ? "it does not say why" : why, kAllowed);
  const auto* plugin = static_cast<const Plugin*>(::dlsym(library, "kvkeep_plugin"));
  KVKEEP_REQUIRE(plugin != nullptr && std::string_view(plugin->mark) == kOurs, "load_plugin: ", file.string(),
                 " exports no kvkeep_plugin", kAllowed);
  return *plugin;
}

struct Loaded {
  std::filesystem::path file;
  const Plugin* plugin = nullptr;
};

/// Recursive: a plug-in may load another one.
std::recursive_mutex loading;

std::vector<Loaded>& all_loaded() {
  static std::vector<Loaded> all;
  return all;
}

void add(const std::filesystem::path& file, const Plugin& plugin) {
  try {
    plugin.add();
  } catch (const std::exception& e) {
    refuse("load_plugin: ", file.string(), " did not register: ", said_by(e));
  } catch (...) {
    refuse("load_plugin: ", file.string(), " did not register: it threw what is no std::exception");
  }
}

}  // namespace

void load_plugin(const std::filesystem::path& given) {
  KVKEEP_REQUIRE(!given.empty(), "load_plugin: the path is empty", kAllowed);
  const std::filesystem::path file = std::filesystem::absolute(given);
  const std::string version = version_in(io::read_file(file, "load_plugin"));
  KVKEEP_REQUIRE(!version.empty(), "load_plugin: ", file.string(), " is no plug-in of kvkeep", kAllowed);
  KVKEEP_REQUIRE(version == kVersion, "load_plugin: ", file.string(), " was compiled for kvkeep ", shortened(version),
                 ", and this is kvkeep ", kVersion, "; allowed a plug-in that was compiled for this version");
  const std::lock_guard lock(loading);
  const Plugin& plugin = opened(file);
  std::vector<Loaded>& all = all_loaded();
  if (std::ranges::find(all, &plugin, &Loaded::plugin) != all.end()) return;
  KVKEEP_REQUIRE(plugin.layout == plugin_layout(), "load_plugin: ", file.string(),
                 " was compiled with flags under which strings, containers or structs have other sizes than in this "
                 "kvkeep; allowed the same standard library and its ABI, without _GLIBCXX_DEBUG and -fpack-struct");
  KVKEEP_REQUIRE(plugin.registry() == registry_of_this_process(), "load_plugin: ", file.string(),
                 " is linked to another kvkeep than this program, which would not see its policies; allowed the one "
                 "shared library kvkeep::kvkeep in both (BUILD_SHARED_LIBS=ON)");
  add(file, plugin);
  all.push_back({file, &plugin});
}

std::vector<std::filesystem::path> loaded_plugins() {
  const std::lock_guard lock(loading);
  std::vector<std::filesystem::path> files;
  for (const Loaded& one : all_loaded()) files.push_back(one.file);
  return files;
}

const void* registry_of_this_process() { return &known_policies(); }

}  // namespace kvkeep
