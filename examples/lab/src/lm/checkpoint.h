// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The source of a model's tensors, whatever its files look like: by Hugging Face names, with rows in Hugging Face's
/// order.

#include <filesystem>
#include <memory>
#include <optional>

#include "kvkeep/io/model_config.h"
#include "kvlab/tensor.h"
#include "kvlab/weights.h"

namespace kvkeep::lm::detail {

class Checkpoint {
 public:
  /// A GGUF file if `path` is a file, else a Hugging Face folder. Throws: InvalidArgument for what their readers
  /// refuse.
  static std::unique_ptr<const Checkpoint> open(const std::filesystem::path& path, const io::ModelConfig& config);

  Checkpoint() = default;
  virtual ~Checkpoint() = default;
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /// Throws: InvalidArgument, naming tensor and file, unless it exists in this shape and in a dtype that can be read.
  /// Cost: none of its bytes are touched.
  virtual void check(const TensorSpec& wanted) const = 0;

  /// The tensor, contiguous, as `dtype`; without one as it is stored, or as f32 if it is quantised. A view of the file
  /// if nothing changes and the file allows it. Throws: as check().
  [[nodiscard]] virtual Tensor tensor(const TensorSpec& wanted, std::optional<Dtype> dtype = {}) const = 0;

  /// What the factors of norms are above the stored numbers: 1 where they are stored less one, else 0.
  [[nodiscard]] virtual double norms_above_stored() const = 0;

  /// Bytes of memory that tensor() of a checked tensor takes; 0 for a view.
  [[nodiscard]] virtual double copied_bytes(const TensorSpec& wanted, std::optional<Dtype> dtype) const = 0;
};

[[nodiscard]] std::unique_ptr<const Checkpoint> open_folder_checkpoint(const std::filesystem::path& folder,
                                                                       const io::ModelConfig& config);

/// Also throws InvalidArgument for a tensor that a model of `config` does not have: its effect would be silently left
/// out.
[[nodiscard]] std::unique_ptr<const Checkpoint> open_gguf_checkpoint(const std::filesystem::path& path,
                                                                     const io::ModelConfig& config);

}  // namespace kvkeep::lm::detail
