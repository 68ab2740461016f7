// SPDX-License-Identifier: Apache-2.0
// --plugin of every sub-command, and KVKEEP_PLUGINS.

#include "kvkeep/policy/plugin.h"

#include <CLI/Option.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kPlugins = "KVKEEP_PLUGINS";

void add_to(CLI::App& app, const std::shared_ptr<std::vector<std::string>>& given) {
  const auto add = [given](const std::vector<std::string>& files) { append(*given, files); };
  const std::string what =
      text("repeatable: a shared library with policies of its own; ", kPlugins, " names more, between colons");
  as_input(app.add_option_function<std::vector<std::string>>("--plugin", add, what))
      ->take_all()
      ->allow_extra_args(false)
      ->option_text("FILE");
}

}  // namespace

Run add_plugins(CLI::App& app) {
  auto given = std::make_shared<std::vector<std::string>>();
  add_to(app, given);
  for (CLI::App* command : app.get_subcommands([](const CLI::App* c) { return !c->get_group().empty(); }))
    add_to(*command, given);
  return [given] {
    std::string rest;
    if (const char* files = std::getenv(kPlugins)) rest = files;
    for (const std::string& file : split(rest, ':'))
      if (!file.empty()) load_plugin(file);
    for (const std::string& file : *given) load_plugin(file);
  };
}

}  // namespace kvkeep::cli
