// SPDX-License-Identifier: Apache-2.0
// kvkeep tokens: text as a model's tokenizer sees it.

#include "commands.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/core/error.h"
#include "model_options.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kTokensExamples = R"(
Examples:
  kvkeep tokens --model SmolLM2.gguf --prompt "The special magic number is 48213."
  kvkeep tokens --model SmolLM2.gguf --chat --prompt "Why is the sky blue?"
  kvkeep tokens --model SmolLM2.gguf --prompt-file article.txt -o csv
  kvkeep tokens --model SmolLM2.gguf --ids 504,2767,13734

A piece is the text of one token; bytes that are not a whole character by themselves are shown as <0xE2>.
)";

struct TokensOptions {
  std::string model;
  PromptOptions prompt;
  OutputOptions output;
};

// Characters as they are; line ends and tabs are escaped, and bytes that are not a whole character are shown in hex.
std::string visible(std::string_view piece) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  std::string shown;
  for (std::size_t i = 0; i < piece.size();) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    const std::size_t length = byte < 0x80 ? 1 : byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC2 ? 2 : 0;
    bool whole = length > 0 && i + length <= piece.size();
    for (std::size_t k = 1; whole && k < length; ++k)
      whole = (static_cast<unsigned char>(piece[i + k]) & 0xC0U) == 0x80U;
    if (byte == '\n')
      shown += "\\n";
    else if (byte == '\r')
      shown += "\\r";
    else if (byte == '\t')
      shown += "\\t";
    else if (whole && byte >= 0x20 && byte != 0x7F)
      shown.append(piece.substr(i, length));
    else
      shown += {'<', '0', 'x', kDigits[byte >> 4U], kDigits[byte & 15U], '>'};
    i += whole ? length : 1;
  }
  return shown;
}

void run(const TokensOptions& o) {
  PromptOptions::Prompt prompt = o.prompt.read(o.model);
  if (!prompt.text) prompt.text = lm::TextModel::open(o.model);
  const lm::Tokenizer& tokenizer = prompt.text->tokenizer;
  Table table({{"place", "place"}, {"id", "id"}, {"piece", "piece", false}, {"special", "special", false}});
  for (std::size_t i = 0; i < prompt.ids.size(); ++i) {
    const std::int32_t id = prompt.ids[i];
    KVKEEP_REQUIRE(id < tokenizer.vocab_size(), "tokens: there is no token ", id, "; allowed 0 to ",
                   tokenizer.vocab_size() - 1);
    const std::string piece = visible(tokenizer.piece(id));
    table.add({static_cast<std::int64_t>(i), id, Cell(piece, text("`", piece, "`")),
               Cell(tokenizer.is_special(id), tokenizer.is_special(id) ? "yes" : "")});
  }
  print(table.text(o.output.format));
}

}  // namespace

Run add_tokens(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("tokens", "text as a model's tokenizer sees it: ids and pieces");
  auto o = std::make_shared<TokensOptions>();
  add_model(*sub, o->model, "a GGUF file, or a folder with tokenizer.json");
  o->prompt.add(*sub);
  o->output.add(*sub);
  sub->footer(kTokensExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
