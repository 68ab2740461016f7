// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Plug-ins: shared libraries with scorers, allocators and policies, which a program loads by the path of a file.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/allot/allocator.h"
#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"

namespace kvkeep {

/// Loads a shared library with KVKEEP_PLUGIN(), which adds its scorers, allocators and policies to those of
/// this process (kvkeep/policy/registry.h). One that is loaded already is left as it is. Any thread may load at any
/// time; nothing is ever unloaded.
///
/// Throws InvalidArgument, before anything of the library runs, if the file cannot be read, is no plug-in, or was
/// compiled for another kvkeep than this; if the system cannot load it; and, before it registers, if it was compiled
/// with flags under which what the two exchange has another layout (_GLIBCXX_DEBUG, -fpack-struct, another standard
/// library), or was linked to a kvkeep of its own, whose policies this one would not see, as happens where one of the
/// two is static. Also if it throws, as it does for a name that is taken: then what it added before stays. Its static
/// objects are made by the system's loader: an exception of theirs ends the program.
void load_plugin(const std::filesystem::path& file);

/// The files that load_plugin() loaded, as absolute paths, in order.
[[nodiscard]] std::vector<std::filesystem::path> loaded_plugins();

/// Differs where what a plug-in and its program exchange has different sizes.
[[nodiscard]] constexpr std::uint64_t plugin_layout() {
  std::uint64_t all = 0;
  for (const std::size_t size :
       {sizeof(std::string), sizeof(std::vector<int>), sizeof(std::map<int, int>), sizeof(std::function<void()>),
        sizeof(std::unique_ptr<int>), sizeof(std::optional<int>), sizeof(Row), sizeof(RowGroup), sizeof(RowTable),
        sizeof(ModelSpec), sizeof(Evidence), sizeof(RowLimit), sizeof(Limits), sizeof(Needs), sizeof(Scores),
        sizeof(WindowAttention), sizeof(Decision), sizeof(AllocatorContext), sizeof(Trigger)})
    all = all * 0x100000001b3 + size;
  return all;
}

/// What a plug-in exports under the name `kvkeep_plugin`.
struct Plugin {
  char mark[64];                   ///< KVKEEP_PLUGIN_MARK, which is read from the file before it is loaded
  const void* (*registry)() = {};  ///< registry_of_this_process()
  void (*add)() = {};              ///< registers
  std::uint64_t layout = plugin_layout();
};

/// Tells one kvkeep in a process from another.
[[nodiscard]] const void* registry_of_this_process();

}  // namespace kvkeep

/// What a plug-in's file holds: "kvkeep plug-in of 0.1.0;".
#define KVKEEP_PLUGIN_MARK "kvkeep plug-in of " KVKEEP_VERSION ";"

/// Once in a shared library, followed by a body that registers:
///
///     KVKEEP_PLUGIN() { kvkeep::register_scorer<Vmax>(); }
#define KVKEEP_PLUGIN()                                                                                        \
  static void kvkeep_plugin_adds();                                                                            \
  extern "C" __attribute__((visibility("default"))) const kvkeep::Plugin kvkeep_plugin;                        \
  const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, kvkeep_plugin_adds, \
                                     kvkeep::plugin_layout()};                                                 \
  static void kvkeep_plugin_adds()
