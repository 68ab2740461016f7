// SPDX-License-Identifier: Apache-2.0
// Any text as a chat template: it is refused with a sentence when it is read, or renders, twice the same, or refuses
// the messages with a sentence.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/error.h"
#include "kvlab/chat.h"

namespace {

using namespace kvkeep;

void require(bool holds) {
  if (!holds) std::abort();
}

std::string outcome(const lm::ChatTemplate& jinja, const std::vector<lm::ChatMessage>& messages, bool begun) {
  try {
    return jinja.render(messages, begun);
  } catch (const Error& refused) {
    require(std::string_view(refused.what()).starts_with("render chat: "));
    return refused.what();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  static const std::vector<lm::ChatMessage> messages{{"system", "Be brief."},
                                                     {"user", " Hi <b>\n"},
                                                     {"assistant", "<think>\nh\xc3\xa9\n</think>\n\xff"},
                                                     {"user", ""}};
  try {
    const auto jinja = lm::ChatTemplate::parse(bytes, {.bos = "<s>", .eos = "</s>"});
    for (const bool begun : {false, true})
      require(outcome(jinja, messages, begun) ==
              outcome(lm::ChatTemplate::parse(bytes, {.bos = "<s>", .eos = "</s>"}), messages, begun));
    // The bytes as a user's message.
    static const auto trims = lm::ChatTemplate::parse("{{ messages[0].content | trim }}{{ messages[0].content[1:] }}");
    (void)trims.render(std::vector<lm::ChatMessage>{{"user", std::string(bytes)}});
  } catch (const Unsupported& refused) {
    require(std::string_view(refused.what()).starts_with("read chat template: line "));
  }
  return 0;
}
