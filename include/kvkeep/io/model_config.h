// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What a decoder needs to know about a model, from a Hugging Face folder or a GGUF file.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvkeep/core/model_spec.h"

namespace kvkeep::io {

class GgufFile;

/// RoPE as a config describes it. Source: transformers `modeling_rope_utils.py` (frequencies), checked against
/// transformers 4.51, 4.57, 5.5.
struct RopeConfig {
  enum class Type : std::uint8_t { standard, linear, llama3, yarn };  ///< `standard` is called "default" in config.json

  Type type = Type::standard;
  double theta = 10000.0;
  double factor = 1.0;            ///< all but `standard`
  std::int64_t original_max = 0;  ///< `original_max_position_embeddings`: llama3, yarn (0: the model's max_positions)
  double low_freq_factor = 1.0;   ///< llama3
  double high_freq_factor = 4.0;  ///< llama3
  double beta_fast = 32.0;        ///< yarn
  double beta_slow = 1.0;         ///< yarn
  bool truncate = true;           ///< yarn: correction range rounded to whole pairs
  std::optional<double> attention_factor = {};  ///< yarn: on cos and sin; from `factor` (and the mscales) if absent
  std::optional<double> mscale = {};            ///< yarn
  std::optional<double> mscale_all_dim = {};    ///< yarn
  std::vector<double> divisors = {};  ///< [head_dim / 2] further divisors of the frequencies: `rope_freqs.weight` of a
                                      ///< GGUF file, Llama 3's scaling; empty: none
};

/// Frequencies after scaling, and the factor on cos and sin, for heads of `head_dim`.
RopeSpec make_rope(const RopeConfig& rope, std::int32_t head_dim, std::int64_t max_positions);

enum class Architecture : std::uint8_t { llama, qwen2, qwen3, smollm3, gemma3 };

/// What multiplies the MLP's `up` half.
enum class Activation : std::uint8_t {
  silu,       ///< x * sigmoid(x)
  gelu_tanh,  ///< x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2: Gemma
};

/// A decoder-only model: shapes, conventions, end tokens.
struct ModelConfig {
  Architecture architecture = Architecture::llama;
  std::int32_t vocab = 0;
  std::int32_t hidden = 0;
  std::int32_t intermediate = 0;
  double rms_eps = 1e-6;
  std::int64_t max_positions = 2048;
  bool tied = false;  ///< the output matrix is the embedding
  bool qkv_bias = false;
  bool output_bias = false;  ///< on o_proj
  bool mlp_bias = false;
  bool qk_norm = false;     ///< RMSNorm on each query and key head, before RoPE
  bool post_norms = false;  ///< RMSNorm also behind attention and MLP, before each is added (Gemma)
  Activation activation = Activation::silu;
  double embedding_scale = 1.0;  ///< factor on embeddings: sqrt(hidden) for Gemma
  RopeConfig rope;
  std::optional<RopeConfig> sliding_rope = {};  ///< of sliding layers, where it differs: Gemma 3
  std::vector<std::int32_t> end_tokens;  ///< from generation_config.json, from config.json if that names none, or from
                                         ///< a GGUF file's metadata; may be empty
  ModelSpec spec;                        ///< heads, head size, layers and their kinds, final RoPE

  [[nodiscard]] std::int32_t num_layers() const { return spec.num_layers(); }
  [[nodiscard]] bool ends(std::int32_t token) const;

  /// Throws InvalidArgument with the first field that is out of range.
  void check() const;

  /// Reads `path`/config.json and, if present, generation_config.json. Understands the layout of transformers 4
  /// (`rope_theta`, `rope_scaling` with `rope_type` or `type`) and of 5 (`rope_parameters`). If `path` is not a folder,
  /// reads the metadata of a GGUF file: the same architectures; `vocab` is the number of rows of its
  /// embedding. Throws: InvalidArgument for a missing or malformed field; Unsupported, by name, for a model type, RoPE
  /// type, activation or quantisation that the decoder does not support. Does not touch the weights.
  static ModelConfig read(const std::filesystem::path& path);

  /// The same from an open GGUF file. Cost: of the weights only the divisors of RoPE are read. Source: llama.cpp,
  /// llama-model.cpp (`load_hparams`), and its defaults.
  static ModelConfig read(const GgufFile& file);

  /// The same from JSON texts; `where` names the source in messages. `generation` may be empty.
  static ModelConfig parse(std::string_view config, std::string_view generation, const std::string& where);

  /// A small valid model to start from (tests, benches, the trainer): set the fields, then `spec` follows from
  /// `shape()`.
  static ModelConfig shape(Architecture architecture, std::int32_t layers, std::int32_t hidden,
                           std::int32_t intermediate, std::int32_t query_heads, std::int32_t kv_heads,
                           std::int32_t head_dim, std::int32_t vocab, RopeConfig rope = {});

  /// config.json as transformers 4 saves it, which 5 reads too; reading it back gives an equal config. Throws:
  /// InvalidArgument if RoPE has divisors, which config.json cannot express.
  [[nodiscard]] std::string json(std::string_view dtype) const;
};

}  // namespace kvkeep::io
