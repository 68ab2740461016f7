#pragma once
/// A model's config from the metadata of its GGUF file.

#include "kvkeep/lm/config.h"

namespace kvkeep::io {
class GgufFile;
}

namespace kvkeep::lm::detail {

/// Throws: InvalidArgument for a missing key or one out of range, and for what GgufFile refuses; Unsupported, by name,
/// for what the decoder has no code for. Cost: the header; of the weights only the divisors of RoPE. Source:
/// llama.cpp, llama-model.cpp (`load_hparams`), and its defaults.
[[nodiscard]] LmConfig read_gguf_config(const io::GgufFile& file);

}  // namespace kvkeep::lm::detail
