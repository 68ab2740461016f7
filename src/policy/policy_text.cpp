// SPDX-License-Identifier: Apache-2.0
// Policies from "name,key=value,...".

#include <algorithm>
#include <cctype>

#include "known_policies.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/option_fields.h"

namespace kvkeep {
namespace {

OptionValue object_of(std::string_view text) {
  if (const std::string_view first = prefill_part(text); first.size() < text.size()) {
    OptionValue object = object_of(first);
    KVKEEP_REQUIRE(!object.contains("decode"),
                   "policy: decode is given twice, as an option and after a +; allowed once");
    object["decode"] = object_of(text.substr(first.size() + 1));
    return object;
  }
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  KVKEEP_REQUIRE(first == std::string_view::npos || text[first] != '{', "policy: this is JSON; given ", shortened(text),
                 "; allowed name,key=value,... (JSON: make_policy_from_json(), or a file for the command)");
  const std::size_t comma = text.find(',');
  const std::string name(text.substr(0, comma));
  OptionValue object;
  object["policy"] = name;
  const PolicyInfo info = info_of(known_policies().named(name));
  while (text.find(',') != std::string_view::npos) {
    text.remove_prefix(text.find(',') + 1);
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const std::string item(text.substr(0, text.find(',')));
    const std::size_t equals = item.find('=');
    KVKEEP_REQUIRE(equals != std::string::npos && equals > 0, "policy: \"", shortened(item),
                   "\" is not key=value; given \"", shortened(text), "\"; allowed name,key=value,...");
    object.give(full_name_of(info.name, !info.scorer.empty(), info.options, item.substr(0, equals)),
                OptionValue::of_text(item.substr(equals + 1)));
  }
  return object;
}

}  // namespace

std::string_view prefill_part(std::string_view text) {
  const std::string_view name = text.substr(0, text.find_first_of(",+"));
  const KnownPolicy* known = known_policies().find(name);
  if (known == nullptr || !known->entry.narrows) return text;  // the others may name files with a + in their names
  for (std::size_t at = text.find('+'); at != std::string_view::npos; at = text.find('+', at + 1))
    if (at + 1 < text.size() && std::isalpha(static_cast<unsigned char>(text[at + 1])) != 0)
      return text.substr(0, at);  // 1e+5 is a number
  return text;
}

std::unique_ptr<KVPolicy> make_policy(std::string_view text) { return policy_of(object_of(text)); }

std::vector<PolicyFile> files_of_policy(std::string_view text) {
  try {
    return files_of(object_of(text), {});
  } catch (const InvalidArgument&) {  // make_policy() says why
    return {};
  }
}

}  // namespace kvkeep
