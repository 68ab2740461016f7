// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Prompts continue with some of their tokens: chooses these and packs their rows, on a GPU. Same tokens as
/// kvkeep::LayerSelector::tokens(). No LibTorch in here.

#include <cstdint>
#include <span>

#include "layer_selector.h"
#include "ranks.h"
#include "stream.h"

namespace kvkeep::cuda {

struct NarrowArguments {
  std::span<const RankedPrompt> prompts = {};  ///< on the host
  std::int32_t select = 2048;                  ///< tokens that continue, the window's included
  std::int32_t window = 32;                    ///< newest tokens, which are not ranked and always continue
  const std::int32_t* ranks = nullptr;         ///< i32 of the newest layer, each prompt's at RankedPrompt::ranks
  const LayerSelection* states = nullptr;  ///< each prompt's at RankedPrompt::state: fewer than `select` continue where
                                           ///< it has LayerSelection::enough; null: nowhere
  std::int32_t layer = -1;  ///< with `states`: only prompts that this layer has selected are written; -1: all are
  std::int32_t* tokens = nullptr;  ///< i32, each prompt's at RankedPrompt::kept: the best of its ranks, then its
                                   ///< window, ascending; min(select, ranked + window) of them
};

/// Decides on the device: the host need not know which prompts are written. One launch for up to 64 prompts, one block
/// each. Cost: one pass over the ranks. Throws InvalidArgument for a negative window, a select that does not exceed
/// it, and a prompt with fewer than 0 ranked tokens.
void launch_narrow(const NarrowArguments& arguments, Stream stream);

/// Rows of one prompt to be copied.
struct GatheredPrompt {
  std::int64_t from = 0;   ///< its first row in the source
  std::int64_t to = 0;     ///< its first row in the destination
  std::int64_t kept = -1;  ///< where its list of tokens begins; -1: none, every row goes as it is
  std::int32_t rows = 0;   ///< rows to copy
};

struct GatherRowsArguments {
  std::span<const GatheredPrompt> prompts = {};  ///< on the host
  const std::int32_t* tokens = nullptr;          ///< i32 lists from launch_narrow
  const std::byte* from = nullptr;               ///< rows of opaque bytes: hidden states, positions
  std::byte* to = nullptr;                       ///< must not overlap `from`
  std::int64_t row_bytes = 0;
  std::int64_t from_stride = 0;  ///< bytes from row to row
  std::int64_t to_stride = 0;
};

/// Row i of a prompt becomes row tokens[i] of it. One launch for up to 64 prompts. Cost: the bytes copied, read and
/// written once, in words of 16 bytes if both addresses, strides and row_bytes are multiples of 16, else in the
/// widest that divides them. Throws InvalidArgument for rows of fewer than 1 byte or more than 2^30, a stride below
/// that, a negative number of rows, and a list without tokens.
void launch_gather_rows(const GatherRowsArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
