// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The model as a Hugging Face folder: config.json, generation_config.json, model.safetensors in bf16.

#include <cstdint>
#include <string>

#include "llama.h"

namespace train {

/// Creates `folder` if needed. Each file is written under another name and renamed.
void write_hf_folder(const std::string& folder, const Llama& model, int32_t trained_length);

/// Fills `model` with the weights of `folder` (bf16, widened to f32). Throws kvkeep::InvalidArgument if a tensor is
/// missing or has another shape.
void read_hf_weights(const std::string& folder, Llama& model);

}  // namespace train
