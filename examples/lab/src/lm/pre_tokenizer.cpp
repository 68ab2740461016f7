// SPDX-License-Identifier: Apache-2.0
#include "pre_tokenizer.h"

#include <algorithm>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::detail {
namespace {

constexpr std::string_view
    kLlama3Words = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
                   R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    kQwen2Words = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
                  R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    kQwen35Words =
        R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*)"
        R"(|\s*[\r\n]+|\s+(?!\S)|\s+)",
    kTekkenWords = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
                   R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
                   R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    kGpt4oWords =
        R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
        R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
        R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    kDeepSeekV3Words =
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    kThreeNumbers = R"(\p{N}{1,3})", kThreeDigits = "[0-9][0-9][0-9]", kLineEnd = "[\r\n]",
    kEastAsian = "[一-龥ࠀ-一가-퟿]+", kKana = "[一-龥\u3040-ゟ゠-ヿ]+",
    kCasedWords = R"(\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ)"
                  R"(-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-)"
                  R"(ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+)";

const std::vector<WordCut>& word_cuts() {
  static const std::vector<WordCut> cuts{
      {.names = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"},
       .expressions = {kGpt2Words}},
      {.names = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"},
       .expressions = {kDigit, kGpt2Words}},
      {.names = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"},
       .expressions = {kLlama3Words},
       .ignore_merges = true,
       .adds_bos = true},
      {.names = {"smaug-bpe", "dbrx"}, .expressions = {kLlama3Words}},
      {.names = {"qwen2"}, .expressions = {kQwen2Words}, .nfc = true},
      {.names = {"deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"}, .expressions = {kQwen2Words}},
      {.names = {"qwen35"}, .expressions = {kQwen35Words}},
      {.names = {"tekken"}, .expressions = {kTekkenWords}, .ignore_merges = true, .adds_bos = true},
      {.names = {"gpt-4o", "llama4"}, .expressions = {kGpt4oWords}},
      {.names = {"deepseek-v3"}, .expressions = {kThreeNumbers, kKana, kDeepSeekV3Words}},
      {.names = {"deepseek-llm"},
       .expressions = {kLineEnd, kCasedWords, R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)", R"(\s+$)", kEastAsian, kDigit}},
      {.names = {"deepseek-coder"}, .expressions = {kLineEnd, R"(\s?\p{L}+)", R"(\s?\p{P}+)", kEastAsian, kDigit}},
      {.names = {"falcon"}, .expressions = {R"([\p{P}\$\+<=>\^~\|`]+)", kGpt2Words, kThreeDigits}},
      {.names = {"default"}, .expressions = {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2Words, R"(\p{N}+)", kThreeDigits}}};
  return cuts;
}

}  // namespace

const WordCut* word_cut_called(std::string_view name) {
  for (const WordCut& cut : word_cuts())
    if (std::ranges::find(cut.names, name) != cut.names.end()) return &cut;
  return nullptr;
}

bool is_word_cut(std::span<const std::string_view> expressions) {
  return std::ranges::any_of(word_cuts(),
                             [&](const WordCut& cut) { return std::ranges::equal(cut.expressions, expressions); });
}

std::string word_cut_names() {
  return joined(word_cuts(), [](const WordCut& cut) { return joined(cut.names); });
}

}  // namespace kvkeep::lm::detail
