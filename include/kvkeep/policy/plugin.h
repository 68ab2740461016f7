// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Plug-ins: shared libraries with scorers, allocators and policies, which a program loads by the path of a file.

#include <filesystem>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"

namespace kvkeep {

/// Loads a shared library with KVKEEP_PLUGIN(), which adds its scorers, allocators and policies to those of
/// this process (kvkeep/policy/registry.h). One that is loaded already is left as it is. Any thread may load at any
/// time; nothing is ever unloaded.
///
/// Throws InvalidArgument, before anything of the library runs, if the file cannot be read, is no plug-in, or was
/// compiled for another kvkeep than this; if the system cannot load it; if it was linked to a kvkeep of its own, whose
/// policies this one would not see, as happens where one of the two is static; and if it throws, as it does for a name
/// that is taken: then what it added before stays.
void load_plugin(const std::filesystem::path& file);

/// The files that load_plugin() loaded, as absolute paths, in order.
[[nodiscard]] std::vector<std::filesystem::path> loaded_plugins();

/// What a plug-in exports under the name `kvkeep_plugin`.
struct Plugin {
  char mark[64];                   ///< KVKEEP_PLUGIN_MARK, which is read from the file before it is loaded
  const void* (*registry)() = {};  ///< registry_of_this_process()
  void (*add)() = {};              ///< registers
};

/// Tells one kvkeep in a process from another.
[[nodiscard]] const void* registry_of_this_process();

}  // namespace kvkeep

/// What a plug-in's file holds: "kvkeep plug-in of 0.1.0;".
#define KVKEEP_PLUGIN_MARK "kvkeep plug-in of " KVKEEP_VERSION ";"

/// Once in a shared library, followed by a body that registers:
///
///     KVKEEP_PLUGIN() { kvkeep::register_scorer<Vmax>(); }
#define KVKEEP_PLUGIN()                                                                                         \
  static void kvkeep_plugin_adds();                                                                             \
  extern "C" __attribute__((visibility("default"))) const kvkeep::Plugin kvkeep_plugin;                         \
  const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, kvkeep_plugin_adds}; \
  static void kvkeep_plugin_adds()
