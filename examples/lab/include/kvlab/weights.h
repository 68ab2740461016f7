// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The tensors of a checkpoint, a Hugging Face folder or a GGUF file, checked before any of them is used.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kvkeep/io/model_config.h"
#include "kvlab/tensor.h"

namespace kvkeep::lm {

/// A matrix [out, in] and its bias [out]; an undefined bias means none.
struct Linear {
  Tensor weight;  ///< f32/f16/bf16 [out, in], contiguous
  Tensor bias;    ///< f32 [out]
};

struct LayerWeights {
  Tensor input_norm;  ///< f32 [hidden]
  Linear q, k, v, o;
  Tensor q_norm, k_norm;   ///< f32 [D], with io::ModelConfig::qk_norm
  Tensor attention_after;  ///< f32 [hidden], with io::ModelConfig::post_norms: of what attention adds
  Tensor mlp_norm;         ///< f32 [hidden]
  Linear gate, up, down;
  Tensor mlp_after;  ///< f32 [hidden], with io::ModelConfig::post_norms: of what the MLP adds
};

/// All weights of one model. Matrices stay in the dtype they are stored in (views of a folder's mapped files); vectors
/// are widened to f32. Norms are the factors themselves: Gemma's folders hold them less one, its GGUF files whole.
struct Weights {
  Tensor embedding;  ///< f32/f16/bf16 [vocab, hidden]
  std::vector<LayerWeights> layers;
  Tensor final_norm;  ///< f32 [hidden]
  Tensor output;      ///< f32/f16/bf16 [vocab, hidden]; the embedding itself if tied

  /// Reads `path`/model.safetensors, or the shards that model.safetensors.index.json names; or a GGUF file if `path` is
  /// not a folder. Matrices become `dtype`: f32, f16 or bf16 (rounded to nearest even). Without it they stay as they
  /// are stored, and quantised ones become f32: an f16 scale times a few bits is exact or nearly so there, whereas bf16
  /// would round each weight once more, by up to 1/256 of itself, and give another model than the file's. Throws:
  /// InvalidArgument naming the tensor and the file for one that is missing, of another shape, or of a dtype other than
  /// f32, f16, bf16; for a tensor of a GGUF file that the decoder does not support; and for whatever SafetensorsFile
  /// and GgufFile refuse. Everything is checked before anything is returned. Cost: headers and vectors; for matrices
  /// that change their dtype or come from a GGUF file, one pass and memory of their own.
  static Weights read(const std::filesystem::path& path, const io::ModelConfig& config,
                      std::optional<Dtype> dtype = {});

  /// The same numbers in the same dtypes on `device`; an output that is the embedding stays the embedding.
  /// Throws: DeviceError if LibTorch cannot put them there.
  [[nodiscard]] Weights to(Device device) const;
};

/// Name and shape of one tensor that a checkpoint must hold.
struct TensorSpec {
  std::string name;
  std::vector<std::int64_t> shape;
};

/// Every tensor of a checkpoint of `config`, under its Hugging Face name, in the order it is written.
std::vector<TensorSpec> checkpoint_tensors(const io::ModelConfig& config);

/// Writes a model folder with random weights (config.json, generation_config.json, model.safetensors or shards): for
/// tests and benches. Matrices are normal with deviation 1/sqrt(in), norms near 1, so activations keep their size
/// through any depth. The same `seed` gives the same bytes. `dtype` is f32, f16 or bf16.
void write_random_checkpoint(const std::filesystem::path& folder, const io::ModelConfig& config, std::uint64_t seed,
                             Dtype dtype = Dtype::f32, std::int32_t shards = 1);

}  // namespace kvkeep::lm
