// kvkeep policies: what there is to choose from.

#include <CLI/Option.hpp>
#include <algorithm>

#include "commands.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "options.h"
#include "oracle.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kExamples = R"(
Examples:
  kvkeep policies                   every policy, one line each
  kvkeep policies ams-tova          its options with defaults and ranges
  kvkeep policies --all -o json     everything, for programs

A policy is written as name,key=value,... on the command line or as JSON in a file:
  --policy ams-tova,budget=1024,interval=128,window=64
  {"policy": "ams-tova", "budget": 1024, "interval": 128, "allocator": {"window": 64}}
)";

struct Options {
  std::string name;
  bool all = false;
  OutputOptions output;
};

Table overview(const std::vector<PolicyInfo>& known) {
  Table table({{"policy", "policy", false}, {"options", "options"}, {"what", "what", false}, {"source", "source", false}});
  for (const PolicyInfo& policy : known)
    table.add({policy.name, static_cast<std::int64_t>(policy.options.size()), policy.what, policy.source});
  return table;
}

Table options_of(const std::vector<PolicyInfo>& shown) {
  Table table({{"policy", "policy", false},
               {"option", "option", false},
               {"default", "default", false},
               {"allowed", "allowed", false},
               {"what", "what", false},
               {"source", "source", false}});
  for (const PolicyInfo& policy : shown) {
    for (const OptionInfo& option : policy.options)
      table.add({policy.name, option.name, option.fallback, option.allowed, option.what, policy.source});
    if (policy.options.empty()) table.add({policy.name, "-", "-", "-", policy.what, policy.source});
  }
  return table;
}

std::string page(const PolicyInfo& policy) {
  std::string out = text(policy.name, ": ", policy.what, "\nSource: ", policy.source, "\n");
  if (policy.options.empty()) return out + "No options.\n";
  Table table({{"option", "option", false}, {"default", "default", false}, {"allowed", "allowed", false}, {"what", "what", false}});
  for (const OptionInfo& option : policy.options) table.add({option.name, option.fallback, option.allowed, option.what});
  return out + "\n" + table.markdown();
}

void run(const Options& o) {
  const std::vector<PolicyInfo> known = policies();
  std::vector<PolicyInfo> shown;
  std::string names;
  for (const PolicyInfo& policy : known) {
    names += (names.empty() ? "" : ", ") + policy.name;
    if (o.name.empty() || policy.name == o.name) shown.push_back(policy);
  }
  require(!shown.empty(), "policies: there is no policy \"", o.name, "\"; allowed ", names);
  if (o.output.format != Format::md) return print((o.name.empty() && !o.all ? overview(known) : options_of(shown)).text(o.output.format));
  if (o.name.empty() && !o.all) return print(overview(known).markdown());
  std::string out;
  for (const PolicyInfo& policy : shown) out += (out.empty() ? "" : "\n") + page(policy);
  print(out);
}

}  // namespace

Run add_policies(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("policies", "every policy with its options, defaults, ranges and source");
  auto o = std::make_shared<Options>();
  sub->add_option("name", o->name, "one policy")->option_text("NAME");
  sub->add_flag("--all", o->all, "the options of every policy");
  o->output.add(*sub);
  sub->footer(kExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
