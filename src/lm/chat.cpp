#include "kvkeep/lm/chat.h"

#include <algorithm>

#include "kvkeep/core/error.h"
#include "untrusted_json.h"
#include "utf8.h"

namespace kvkeep::lm {
namespace {

// Published templates. A hole marks the place of the default system message; with_line_breaks() says how line breaks
// are written.
constexpr char kHole = '@';

constexpr std::string_view kChatml =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

constexpr std::string_view kChatmlWithSystem =  // SmolLM2, Qwen2
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n@<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

constexpr std::string_view kLlama3 =
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + "
    "'<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

constexpr std::string_view kQwen25 = R"({%- if tools %}
    {{- '<|im_start|>system
' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- '@' }}
    {%- endif %}
    {{- "

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>" }}
    {%- for tool in tools %}
        {{- "
" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{\"name\": <function-name>, \"arguments\": <args-json-object>}
</tool_call><|im_end|>
" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system
' + messages[0]['content'] + '<|im_end|>
' }}
    {%- else %}
        {{- '<|im_start|>system
@<|im_end|>
' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '
' + message.content + '<|im_end|>' + '
' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '
' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '
<tool_call>
{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}
</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>
' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '
<tool_response>
' }}
        {{- message.content }}
        {{- '
</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>
' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant
' }}
{%- endif %})";

/// Inside a string of the template, some files have a line break, others a backslash and an n: the same to jinja. One
/// line break at the end is dropped, as in jinja.
std::string with_line_breaks(std::string_view jinja) {
  if (jinja.ends_with('\n')) jinja.remove_suffix(1);
  std::string out;
  for (std::size_t at = 0; at < jinja.size(); ++at) {
    const bool escaped = jinja.substr(at, 2) == "\\n";
    out.push_back(escaped ? '\n' : jinja[at]);
    at += escaped ? 1 : 0;
  }
  return out;
}

/// The text in the holes of `known`, which must be the same in each; nothing if the texts differ elsewhere. A message
/// with quotes or escapes is not tried.
std::optional<std::string> fills(std::string_view known, std::string_view jinja) {
  const std::size_t hole = known.find(kHole);
  if (hole == std::string_view::npos || jinja.size() < hole)
    return known == jinja ? std::optional<std::string>("") : std::nullopt;
  const std::string message(jinja.substr(hole, jinja.find_first_of("'<", hole) - hole));
  if (message.find('\\') != std::string::npos) return std::nullopt;
  std::string filled;
  for (const char c : known)
    if (c == kHole)
      filled += message;
    else
      filled += c;
  return filled == jinja ? std::optional(message) : std::nullopt;
}

/// Python's str.strip(), as the filter `trim` applies it.
std::string_view stripped(std::string_view utf8) {
  const auto blank = [](char32_t code) {
    return detail::class_of(code) == detail::CharClass::space || (code >= 0x1c && code <= 0x1f);
  };
  std::size_t begin = utf8.size(), end = 0;
  for (std::size_t at = 0; at < utf8.size();) {
    const detail::Utf8Step step = detail::first_step(utf8.substr(at));
    const bool stays = step.state != detail::Utf8State::good || !blank(detail::character_at(utf8, at).code);
    if (stays) begin = std::min(begin, at);
    at += step.bytes;
    if (stays) end = at;
  }
  return begin < end ? utf8.substr(begin, end - begin) : std::string_view();
}

}  // namespace

ChatTemplate ChatTemplate::recognise(std::string_view jinja, std::string_view bos) {
  const std::string given = with_line_breaks(jinja);
  ChatTemplate found;
  if (given == kChatml) return found;
  if (given == kLlama3) {
    found.kind_ = Kind::llama3;
    found.bos_ = bos;
    return found;
  }
  if ((found.default_system_ = fills(kChatmlWithSystem, given))) return found;
  found.kind_ = Kind::qwen25;
  if ((found.default_system_ = fills(kQwen25, given))) return found;
  refuse<Unsupported>("read chat template: ", io::shown(jinja),
                      " is not known; allowed those of SmolLM2, Qwen2, Qwen2.5, Llama 3 and plain ChatML, or --raw, "
                      "which takes the prompt as it is");
}

std::string_view ChatTemplate::name() const {
  return kind_ == Kind::chatml ? "chatml" : kind_ == Kind::qwen25 ? "qwen2.5" : "llama3";
}

std::string ChatTemplate::render(std::span<const ChatMessage> messages, bool add_generation_prompt) const {
  KVKEEP_REQUIRE(!messages.empty(), "render chat: no messages; allowed one or more");
  for (const ChatMessage& message : messages)
    KVKEEP_REQUIRE(message.role == "system" || message.role == "user" || message.role == "assistant",
                   "render chat: the role ", io::shown(message.role), " is not known; allowed system, user, assistant");
  std::string out = bos_;
  const auto turn = [&](std::string_view role, std::string_view content) {
    if (kind_ == Kind::llama3)
      out += text("<|start_header_id|>", role, "<|end_header_id|>\n\n", stripped(content), "<|eot_id|>");
    else
      out += text("<|im_start|>", role, "\n", content, "<|im_end|>\n");
  };
  if (default_system_ && messages.front().role != "system") turn("system", *default_system_);
  for (const ChatMessage& message : messages) turn(message.role, message.content);
  if (add_generation_prompt)
    out += kind_ == Kind::llama3 ? "<|start_header_id|>assistant<|end_header_id|>\n\n" : "<|im_start|>assistant\n";
  return out;
}

}  // namespace kvkeep::lm
