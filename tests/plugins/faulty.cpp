// SPDX-License-Identifier: Apache-2.0
// Plug-ins that must be refused, each compiled with the name of its fault.

#include <cstdlib>
#include <stdexcept>

#include "kvkeep/policy/plugin.h"
#include "kvkeep/score/tova.h"

namespace {

/// Code of the library that runs when it is loaded, whatever it exports.
[[maybe_unused]] const int kRan = ::setenv("KVKEEP_TEST_FAULTY_RAN", "1", 1);

[[maybe_unused]] void throws() { throw std::runtime_error("this plug-in has a bad day"); }
[[maybe_unused]] void throws_a_number() { throw 7; }
[[maybe_unused]] void throws_no_word() { throw std::runtime_error(""); }
[[maybe_unused]] void takes_a_name() { kvkeep::register_scorer<kvkeep::Tova>(); }
[[maybe_unused]] const void* elsewhere() { return &kRan; }

}  // namespace

#ifndef NOT_EXPORTED
extern "C" __attribute__((visibility("default"))) const kvkeep::Plugin kvkeep_plugin;
#else
#define kvkeep_plugin kvkeep_other_name
extern "C" __attribute__((visibility("default"))) const kvkeep::Plugin kvkeep_other_name;
#endif

#ifdef OTHER_VERSION
const kvkeep::Plugin kvkeep_plugin{"kvkeep plug-in of 0.0.9;", kvkeep::registry_of_this_process, throws};
#elif defined(OTHER_KVKEEP)
const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, elsewhere, throws};
#elif defined(THROWS_A_NUMBER)
const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, throws_a_number};
#elif defined(THROWS_NO_WORD)
const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, throws_no_word};
#elif defined(TAKES_A_NAME)
const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, takes_a_name};
#else
const kvkeep::Plugin kvkeep_plugin{KVKEEP_PLUGIN_MARK, kvkeep::registry_of_this_process, throws};
#endif
