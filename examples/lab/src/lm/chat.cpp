// SPDX-License-Identifier: Apache-2.0
#include "kvlab/chat.h"

#include <cstdint>
#include <vector>

#include "jinja_parser.h"
#include "jinja_renderer.h"
#include "kvkeep/core/error.h"

namespace kvkeep::lm {

using jinja::Kind;
using jinja::Value;

ChatTemplate ChatTemplate::parse(std::string_view jinja, ChatContext context) {
  KVKEEP_REQUIRE(context.date.ok(), "chat template: the date is not in the calendar");
  return {jinja::parse(jinja), std::move(context)};
}

std::string ChatTemplate::render(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  KVKEEP_REQUIRE(!messages.empty(), "render chat: no messages; allowed one or more");
  constexpr std::uint64_t kWork = std::uint64_t{64} << 20U, kWorkPerByte = 64;
  std::uint64_t bytes = 0;
  for (const ChatMessage& message : messages) bytes += sizeof message + message.role.size() + message.content.size();
  jinja::Work work(kWork + kWorkPerByte * bytes);
  std::vector<Value> said;
  for (const ChatMessage& message : messages)
    said.push_back(made_dict({"role", "content"}, {Value::of(message.role), Value::of(message.content)}, work));
  const Value none{.kind = Kind::none};
  std::vector<std::pair<std::string, Value>> names{{"messages", made(Kind::list, std::move(said), work)},
                                                   {"add_generation_prompt", Value::of(add_generation_prompt)},
                                                   {"tools", none},
                                                   {"documents", none}};
  if (context_.bos) names.emplace_back("bos_token", Value::of(*context_.bos));
  if (context_.eos) names.emplace_back("eos_token", Value::of(*context_.eos));
  return jinja::render(*tree_, std::move(names), context_.date, work);
}

bool ChatTemplate::begins_with_bos(std::string_view rendered) const {
  return context_.bos && !context_.bos->empty() && rendered.starts_with(*context_.bos);
}

}  // namespace kvkeep::lm
