#pragma once
// kvkeep generate --html: the text, each token shaded by how many heads still hold it.

#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvlab/generation.h"

namespace kvkeep::cli {

struct PictureAbout {
  std::string model, policy;
  std::int32_t prompt_length = 0;
  std::vector<std::string>
      pieces;  // of the prompt's tokens and of those fed after it; bytes that are not UTF-8 show as U+FFFD
};

// One HTML page without network access: a slider over the events and the end, layers and heads to choose. Needs a run
// with keep_positions. Size: the text, and a few bytes for each run of kept positions in each row and event.
std::string picture_page(const PictureAbout& about, const ModelSpec& spec, const lm::Completion& done);

}  // namespace kvkeep::cli
