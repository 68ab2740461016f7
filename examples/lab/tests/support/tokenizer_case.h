// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Small tokenizers of tests: the golden ones, and one that knows bytes alone.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "kvlab/tokenizer.h"

namespace kvkeep::lm::testing {

inline const std::filesystem::path kGoldenTokenizers = std::filesystem::path(KVKEEP_TEST_GOLDEN_DIR) / "tokenizer";

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::filesystem::path file_of(const std::string& name) { return kGoldenTokenizers / name / "tokenizer.json"; }

inline std::string alphabet_of(const std::string& bytes) {
  std::string out;
  const auto itself = [](unsigned c) { return (c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || c >= 0xae; };
  for (const char byte : bytes) {
    const unsigned value = static_cast<unsigned char>(byte);
    unsigned code = value;
    if (!itself(value)) {
      code = 0x100;
      for (unsigned before = 0; before < value; ++before) code += itself(before) ? 0 : 1;
    }
    if (code < 0x80)
      out += static_cast<char>(code);
    else
      out += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
  }
  return out;
}

// All bytes, in their order, as ids 0 to 255.
inline TokenizerParts bytes_alone(const std::string& pre = "gpt-2") {
  TokenizerParts parts;
  for (int byte = 0; byte < 256; ++byte) parts.tokens.push_back(alphabet_of(std::string(1, static_cast<char>(byte))));
  parts.pre_tokenizer = pre;
  return parts;
}

// SentencePiece's: <0x00> to <0xFF> as ids 0 to 255, then pieces with their scores.
inline TokenizerParts pieces_of(const std::vector<std::pair<std::string, float>>& pieces) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  TokenizerParts parts;
  parts.model = "llama";
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back({'<', '0', 'x', kDigits[byte / 16], kDigits[byte % 16], '>'});
  parts.types.assign(256, 6);
  parts.scores.assign(256, 0.0F);
  for (const auto& [piece, score] : pieces) {
    parts.tokens.push_back(piece);
    parts.types.push_back(1);
    parts.scores.push_back(score);
  }
  return parts;
}

}  // namespace kvkeep::lm::testing
