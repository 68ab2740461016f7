#pragma once
/// Cuts text into words before merges: four published regular expressions, written out.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace kvkeep::lm::detail {

/// By GGUF's names ("tokenizer.ggml.pre").
enum class PreTokenizer : std::uint8_t {
  gpt2,       ///< "gpt-2": 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  smollm,     ///< "smollm": each number by itself, then gpt-2 between them
  llama_bpe,  ///< "llama-bpe": kLlama3Words
  qwen2,      ///< "qwen2": kQwen2Words
  none,       ///< SentencePiece: a text is one word
  blanks,     ///< each blank begins a word
};

inline constexpr std::string_view kLlama3Words = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
                                                 R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kQwen2Words = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})"
                                                R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr std::string_view kPreTokenizerNames = "gpt-2, smollm, llama-bpe, qwen2";  ///< for messages

[[nodiscard]] std::optional<PreTokenizer> pre_tokenizer_called(std::string_view name);

/// The end of the word that begins at byte `begin` < text.size(). `text` is UTF-8. Cost: O(word), and one look at the
/// blanks after it.
[[nodiscard]] std::size_t word_end(PreTokenizer pre, std::string_view text, std::size_t begin);

}  // namespace kvkeep::lm::detail
