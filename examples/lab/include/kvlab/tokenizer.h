// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Text to token ids and back: byte-level BPE and SentencePiece's BPE, with the ids of Hugging Face's `tokenizers` and
/// of llama.cpp.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvkeep::lm {

namespace detail {
struct TokenizerData;
enum class Before : std::uint8_t;
}  // namespace detail

/// A tokenizer as GGUF stores it.
struct TokenizerParts {
  /// "tokenizer.ggml.model". "gpt2": byte-level BPE, tokens in GPT-2's alphabet, one character for each byte ("Ġ" is a
  /// blank). "llama": SentencePiece's BPE, "▁" (U+2581) for a blank, and <0x00> to <0xFF> for characters without a
  /// token.
  std::string model = "gpt2";
  std::vector<std::string> tokens;  ///< [vocabulary] by id ("tokenizer.ggml.tokens")
  std::vector<std::int32_t>
      types;  ///< [vocabulary] 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte; empty: all normal
  std::vector<std::string> merges;  ///< "gpt2": "left right", in the order of merging
  std::string pre_tokenizer;        ///< "gpt2": "gpt-2", "smollm", "llama-bpe", "qwen2", ... ("tokenizer.ggml.pre")
  std::vector<float> scores;        ///< "llama": [vocabulary] the highest merges first
  bool add_space_prefix = true;     ///< "llama": a blank in front of a text, and of text after a token that is found
  std::optional<std::int32_t> bos, eos, eot;
  bool add_bos = false;  ///< encode() puts `bos` in front
};

/// How the text of a control token, such as "<|im_end|>", is encoded. User-defined tokens are found either way.
enum class SpecialTokens : std::uint8_t {
  parsed,  ///< as that token: for prompts that a chat template wrote
  plain,   ///< as text like any other: for text that others wrote
};

/// Byte-level BPE with one of the published ways to cut words (examples/lab/docs/text.md lists them), or
/// SentencePiece's BPE, which cuts none: of all neighbouring pieces those that make up the piece of the highest score
/// become one, the leftmost of equals first, until none do; a character without a piece becomes its bytes.
///
/// Ids are those of the package `tokenizers` 0.22 for a tokenizer.json. SentencePiece in GGUF gives the ids of
/// llama.cpp (src/llama-vocab.cpp, llm_tokenizer_spm). Differs from both: of tokens that are found in text the leftmost
/// counts, then the longest; llama.cpp looks for the longest first. Bytes that are not UTF-8 become U+FFFD. A token has
/// the type that its file says: llama.cpp makes control tokens of some names, such as Gemma's "</s>". Text is never
/// merged into a control token. Differs where Unicode versions do: character classes and NFC are utf8proc's, of
/// Unicode 15.0 in Debian 12. The package's classes are of 16.0, so letters and numbers of 15.1 and 16.0 may be split
/// elsewhere; its NFC is of 10.0 and does not sort the 108 combining marks added since.
///
/// Bytes without a token, in byte-level BPE, become the unknown token if the file names one. Otherwise they are left
/// out, as in the package: lacks() says which. SmolLM2 lacks six control characters, and bytes that only characters
/// beyond U+40000 have, where nothing is assigned.
///
/// Immutable, cheap to copy, and safe to use from any number of threads.
class Tokenizer {
 public:
  /// Reads a Hugging Face `tokenizer.json`.
  /// Throws: InvalidArgument for a file that cannot be read, is damaged or contradicts itself; Unsupported, by name,
  /// for a model, normalizer, pre-tokenizer, post-processor, decoder or option that is not supported. Cost: O(file).
  static Tokenizer read(const std::filesystem::path& file);

  /// The same from its text, at most 256 MiB; `where` names the source in messages.
  static Tokenizer from_json(std::string_view json, const std::string& where = "tokenizer.json");

  /// From the parts in a GGUF file. The name of the pre-tokenizer implies more: with "llama-bpe" and "tekken" words
  /// that are tokens are not merged, with "qwen2" text is normalised to NFC. Control and user-defined tokens are found
  /// as written; GGUF does not say which strip blanks next to them. Throws: as from_json() does. Cost: O(parts), and
  /// O(bytes squared) in the longest token of "llama", which has at most 256.
  static Tokenizer from_parts(const TokenizerParts& parts, const std::string& where = "tokenizer");

  /// The ids of a text. Bytes that are not UTF-8 first become U+FFFD, one for each longest beginning of a character, as
  /// Python's bytes.decode("utf-8", errors="replace") does. `add_bos`: if the tokenizer adds a first token, add it (the
  /// package's `add_special_tokens`). SentencePiece's blank in front is added either way. Throws: InvalidArgument for
  /// more than 715,827,882 bytes. Cost: O(n log n) in the longest word, O(n) otherwise.
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view utf8, SpecialTokens special = SpecialTokens::parsed,
                                                 bool add_bos = true) const;

  /// The ids of a text that goes on where another ended: without the first token, and without the blank that
  /// SentencePiece puts in front of a text. Otherwise as encode().
  [[nodiscard]] std::vector<std::int32_t> encode_continuation(std::string_view utf8,
                                                              SpecialTokens special = SpecialTokens::parsed) const;

  /// The bytes of the tokens, one after the other, control tokens as written; UTF-8 if the tokens make it up. Ids
  /// without a token give nothing: models have more rows than their tokenizer has tokens. If encode() puts a blank in
  /// front of a text (Llama 2, not Gemma), the text loses one here. Throws: InvalidArgument for a negative id.
  [[nodiscard]] std::string decode(std::span<const std::int32_t> ids) const;

  /// The same for tokens that go on where a text ended, such as an answer: a blank in front stays.
  [[nodiscard]] std::string decode_continuation(std::span<const std::int32_t> ids) const;

  /// The bytes of one token, with its blank, valid as long as this tokenizer or a copy of it exists.
  [[nodiscard]] std::string_view piece(std::int32_t id) const;

  /// The token with these bytes: "<|im_end|>", " the".
  [[nodiscard]] std::optional<std::int32_t> id_of(std::string_view piece) const;

  /// One more than the largest id.
  [[nodiscard]] std::int32_t vocab_size() const;

  [[nodiscard]] bool is_special(std::int32_t id) const;  ///< a control token, which SpecialTokens::plain does not find
  [[nodiscard]] std::optional<std::int32_t> bos()
      const;  ///< the token that encode() puts in front, or that GGUF names; a tokenizer.json seldom names one
  [[nodiscard]] std::optional<std::int32_t> eos() const;  ///< only GGUF names it
  [[nodiscard]] bool adds_bos() const;

  /// Tokens that end a text, ascending: eos and eot if they are named, and control tokens of a known name (<|im_end|>,
  /// <|eot_id|>, <|eom_id|>, <|end_of_text|>, <|endoftext|>, </s>, <eos>, <end_of_turn>).
  [[nodiscard]] const std::vector<std::int32_t>& end_tokens() const;

  /// The bytes without a token, ascending.
  [[nodiscard]] std::string lacks() const;

 private:
  explicit Tokenizer(std::shared_ptr<const detail::TokenizerData> data) : data_(std::move(data)) {}

  void append(std::vector<std::int32_t>& ids, std::string_view utf8, SpecialTokens special,
              detail::Before before) const;

  std::shared_ptr<const detail::TokenizerData> data_;
};

/// Decodes tokens as they arrive, always into whole characters: the bytes of one may be spread over tokens.
/// Together, push() and finish() give decode_continuation() of the ids, with U+FFFD for bytes that are not UTF-8: a
/// blank in front stays.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}

  /// The text that this token completes; the beginning of a character is held back, at most 3 bytes. Throws as
  /// Tokenizer::decode() does.
  [[nodiscard]] std::string push(std::int32_t id);

  /// U+FFFD if a character was begun and never completed. Resets the decoder.
  [[nodiscard]] std::string finish();

 private:
  Tokenizer tokenizer_;
  std::string held_;
};

}  // namespace kvkeep::lm
