// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A page that shows which tokens of a text stayed in the cache, each shaded by how many heads still hold it.

#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/core/compiled_only.h"

namespace kvkeep::io {

/// What the rows held at one moment: right after an event, or at the end.
struct KeptStop {
  std::string name;                                  ///< as the page calls it: "event 1 of 3, after token 512"
  std::int32_t present = 0;                          ///< tokens seen by then, 0 to the number of pieces
  std::int64_t bytes = 0;                            ///< K and V of the slots held
  std::vector<std::vector<std::int32_t>> rows = {};  ///< [full layers * Hkv] logical positions, ascending, < present
};

/// One text under one policy.
struct KeptText {
  std::string model = {}, policy = {};    ///< as the page names them
  std::vector<std::string> pieces = {};   ///< the text of each token; bytes that are not UTF-8 show as U+FFFD
  std::int32_t prompt = 0;                ///< of the pieces, those of the prompt; the others were written by the model
  std::vector<std::int32_t> layers = {};  ///< numbers of the layers whose rows are shown, ascending
  std::int32_t kv_heads = 1;              ///< Hkv
  bool folds = false;                     ///< what is not held may be folded instead of dropped
  std::vector<KeptStop> stops = {};       ///< in the order of the slider, 1 or more
};

/// The page: HTML without network access, a slider over the stops, layers and heads to choose from, a map of rows by
/// position. Throws InvalidArgument for positions, lengths or numbers of rows out of range. Size: 10 KB, the text, and
/// a few bytes for each run of neighbouring positions in each row and stop.
[[nodiscard]] std::string kept_page(const KeptText& text);

}  // namespace kvkeep::io
