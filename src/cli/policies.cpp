// SPDX-License-Identifier: Apache-2.0
// kvkeep policies: the policies to choose from.

#include <CLI/Option.hpp>
#include <algorithm>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kPoliciesExamples = R"(
Examples:
  kvkeep policies                   scorers, allocators, and which go together
  kvkeep policies ams-tova          its options with defaults and ranges
  kvkeep policies --all -o json     everything, for programs

A policy is written as name,key=value,... on the command line or as JSON in a file:
  --policy ams-tova,budget=1024,interval=128,window=64
  {"policy": "ams-tova", "budget": 1024, "interval": 128, "allocator": {"window": 64}}
)";

// From the tables of examples/lab/docs/results.md.
constexpr const char* kAdvice = R"(
Which one? Right answers in % of two pretrained models, SmolLM2-135M and Gemma 3 270M, that look for a number in 1024
tokens of three texts (examples/lab/docs/results.md); the full cache answers 96 and 96:

- Half of the bytes: a cache of 8 bits, and drop nothing. 96 and 96.
- A quarter: a cache of 4 bits (q4_0), and drop nothing. 85 and 91, whenever the question comes. If it is in sight when
  the prompt is cut, `ams-expected,preset=question` over 16 bits: 94 and 61.
- Less: half of the slots of a cache of 4 bits, a seventh of the bytes: with the question in sight
  `ams-expected,preset=question`, 89 and 81. Folded instead of dropped, if the rest may lie far:
  `ams-tova,preset=question,rest=fold`, in sight 87 and 89, later 83 and 69.
- Dropping loses where the question comes later and less than half stays; which scorer loses least goes by the model:
  `adakv-expected` on SmolLM2, `keydiff` on Gemma.

All of it depends on the text and on the model. To measure yours:
  kvkeep eval --model FILE --task text/needle --haystack TEXT --question after --budgets 512,256 --policy full \
      --policy ams-tova,preset=question --policy adakv-expected --policy keydiff --policy expected,rest=fold
)";

struct PoliciesOptions {
  std::string name;
  bool all = false;
  OutputOptions output;
};

// For programs: every policy, one line each.
Table overview(const std::vector<PolicyInfo>& known) {
  Table table(columns_of({"policy", "scorer", "allocator", "needs", "what", "source"}));
  for (const PolicyInfo& policy : known)
    table.add({policy.name, policy.scorer, policy.allocator, policy.needs, policy.what, policy.source});
  return table;
}

// For people: a line for each scorer with the allocators it goes with, then a line for each allocator. A terminal has
// no room for sources.
std::string survey(const std::vector<PolicyInfo>& known) {
  const bool sources = io::terminal_width(STDOUT_FILENO) == 0;
  const auto table_of = [&](std::initializer_list<const char*> keys) {
    std::vector<Column> columns = columns_of(keys);
    if (sources) append(columns, columns_of({"source"}));
    return Table(std::move(columns));
  };
  const auto add = [&](Table& table, std::vector<Cell> row, const std::string& source) {
    if (sources) row.emplace_back(source);
    table.add(std::move(row));
  };
  std::vector<std::string> allocators;
  for (const PolicyInfo& p : known)
    if (!p.allocator.empty() && std::find(allocators.begin(), allocators.end(), p.allocator) == allocators.end())
      allocators.push_back(p.allocator);
  Table scorers = table_of({"policy", "prefixes", "needs", "what"});
  for (const PolicyInfo& p : known) {
    if (!p.allocator.empty() || p.narrows) continue;
    std::vector<std::string> prefixes;
    for (const std::string& a : allocators)
      if (std::ranges::find(known, a + "-" + p.scorer, &PolicyInfo::name) != known.end()) prefixes.push_back(a + "-");
    const bool all = prefixes.size() == allocators.size();
    add(scorers, {p.name, all ? "all" : joined(prefixes), p.needs, p.what}, p.source);
  }
  Table table = table_of({"name", "alone", "what"});
  for (const std::string& a : allocators) {
    const auto bare = std::find_if(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.name == a; });
    const auto any = std::find_if(known.begin(), known.end(), [&](const PolicyInfo& p) { return p.allocator == a; });
    add(table,
        {a + "-<scorer>", bare == known.end() ? std::string("-") : text("`", a, "` is ", a, "-", bare->scorer),
         any->what.substr(0, any->what.rfind(": "))},
        any->source.substr(0, any->source.find(", over ")));
  }
  Table prompts = table_of({"policy", "what"});
  for (const PolicyInfo& p : known)
    if (p.narrows) add(prompts, {p.name, p.what}, p.source);
  return text(
      "Every policy may read keys and values. A name with one of its prefixes is a policy too, such as `ams-tova`.",
      sources ? "\n\n" : "\n`kvkeep policies NAME` names the source.\n\n", scorers.markdown(), "\n", table.markdown(),
      "\nThese narrow prompts while they run, layer by layer; any policy above may take over afterwards "
      "(`asl,budget=2048+ams-tova,budget=1024`):\n\n",
      prompts.markdown(), kAdvice);
}

Table options_of(const std::vector<PolicyInfo>& shown) {
  Table table(columns_of({"policy", "option", "default", "allowed", "what", "source"}));
  for (const PolicyInfo& policy : shown) {
    for (const OptionInfo& option : policy.options)
      table.add({policy.name, option.name, option.fallback, option.allowed, option.what, policy.source});
    if (policy.options.empty()) table.add({policy.name, "-", "-", "-", policy.what, policy.source});
  }
  return table;
}

std::string page(const PolicyInfo& policy) {
  std::string out = text(policy.name, ": ", policy.what, "\nSource: ", policy.source,
                         "\nNeeds:  ", policy.needs.empty() ? "nothing" : policy.needs, "\n");
  if (!policy.chooses.empty())
    out += text("Chooses by score: ", policy.chooses, " slots; the others are sinks and recents\n");
  if (!policy.pieces.empty()) out += text("Reads in pieces of a prompt (prefill=pieces): ", policy.pieces, "\n");
  if (policy.options.empty()) return out + "No options.\n";
  Table table(columns_of({"option", "default", "allowed", "what"}));
  for (const OptionInfo& option : policy.options)
    table.add({option.name, option.fallback, option.allowed, option.what});
  return out + "\n" + table.markdown();
}

void run(const PoliciesOptions& o) {
  const std::vector<PolicyInfo> shown = o.name.empty() ? policies() : std::vector{policy_called(o.name)};
  const bool briefly = o.name.empty() && !o.all;
  if (o.output.format != Format::md)
    return print((briefly ? overview(shown) : options_of(shown)).text(o.output.format));
  if (briefly) return print(survey(shown));
  std::string out;
  for (const PolicyInfo& policy : shown) out += (out.empty() ? "" : "\n") + page(policy);
  print(out);
}

}  // namespace

Run add_policies(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("policies", "every policy with its options, defaults, ranges and source");
  auto o = std::make_shared<PoliciesOptions>();
  as_policy_name(sub->add_option("name", o->name, "one policy"))->option_text("NAME");
  sub->add_flag("--all", o->all, "the options of every policy");
  o->output.add(*sub);
  sub->footer(kPoliciesExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
