// SPDX-License-Identifier: Apache-2.0
#pragma once
// kvkeep generate --html: a run as the page that shows what stayed (kvkeep/io/kept_page.h).

#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "kvkeep/io/kept_page.h"
#include "kvlab/generation.h"

namespace kvkeep::cli {

// What the events of a run with keep_positions left, and its end. `pieces`: of the prompt's tokens, `prompt` of them,
// and of those fed after it. Names of model and policy are left empty.
io::KeptText kept_text(const ModelSpec& spec, const lm::Completion& done, std::int32_t prompt,
                       std::vector<std::string> pieces);

}  // namespace kvkeep::cli
