// SPDX-License-Identifier: Apache-2.0
#pragma once
// The cost of running samples under one policy, beside their answers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "contests.h"
#include "kvkeep/cli/program.h"
#include "kvlab/generation.h"

namespace kvkeep::cli {

struct RunCost {
  std::int64_t peak_bytes = 0, kept_bytes = 0;
  EventCounts counts;
  double decode_seconds = 0;
  std::int64_t decoded_tokens = 0;
  std::vector<double> first_token_seconds;  // [samples]
  std::int64_t samples_folded = 0, far_bytes = 0, moved_bytes = 0;
  ReadCounts reads;
  std::vector<ReadCounts> reads_by_head;  // [full layers * Hkv]; empty if nothing was folded
  std::int32_t kv_heads = 1;
  std::int64_t prompts_selected = 0, layers_selected = 0, tokens_going_on = 0,
               prompts_narrowed = 0;  // sums over samples

  void add(const lm::Completion& done) {
    peak_bytes = std::max(peak_bytes, done.peak_bytes);
    kept_bytes = std::max(kept_bytes, done.kept_bytes);
    counts.add(done);
    first_token_seconds.push_back(done.first_token_seconds);
    if (done.folded) {
      ++samples_folded;
      far_bytes += done.folded->far_bytes;
    }
    if (!done.prompt) return;
    ++prompts_narrowed;
    tokens_going_on += static_cast<std::int64_t>(done.prompt->going_on.size());
    if (done.prompt->selection_layer < 0) return;
    ++prompts_selected;
    layers_selected += done.prompt->selection_layer;
  }
  void add(const lm::Pace& pace, const Totals& totals) {
    decode_seconds += pace.decode_seconds;
    decoded_tokens += pace.decoded_tokens;
    moved_bytes += totals.reads.bytes;
    reads += totals.reads;
  }
  void add(std::span<const ReadCounts> more, std::int32_t heads) {
    kv_heads = heads;
    reads_by_head.resize(more.size());
    for (std::size_t r = 0; r < more.size(); ++r) reads_by_head[r] += more[r];
  }

  [[nodiscard]] double tokens_per_second() const {
    return decode_seconds > 0 ? static_cast<double>(decoded_tokens) / decode_seconds : std::nan("");
  }
  [[nodiscard]] double median_first_token_ms() const {
    std::vector<double> sorted = first_token_seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? std::nan("") : 1000 * sorted[sorted.size() / 2];
  }

  // For narrowed prompts: the layer of the selection, and the tokens that continue.
  static std::vector<Column> narrowing_columns() { return {{"selection_layer", "layer"}, {"going_on", "go on"}}; }
  [[nodiscard]] std::vector<Cell> narrowing_cells(int digits = 0) const {
    return {real_cell(mean(layers_selected, prompts_selected), digits + 1),
            real_cell(mean(tokens_going_on, prompts_narrowed), digits)};
  }

  // Bytes of factors at the end of a sample; spans that a query opens, and tokens in them; bytes of factors read
  // per decoded token.
  static std::vector<Column> folding_columns() {
    return {{"far_bytes", "far"}, {"opened", "opened"}, {"tokens_opened", "tokens opened"}, {"moved_bytes", "moved"}};
  }
  // [full layers][Hkv] spans that a query opens; null if nothing was folded.
  [[nodiscard]] Cell opened_by_head() const {
    nlohmann::ordered_json rows;
    for (std::size_t r = 0; r < reads_by_head.size(); ++r)
      rows[r / static_cast<std::size_t>(kv_heads)].push_back(reads_by_head[r].a_query(reads_by_head[r].zooms));
    return {std::move(rows), ""};
  }
  [[nodiscard]] std::vector<Cell> folding_cells(int digits = 1) const {
    return {mean_bytes_cell(mean(far_bytes, samples_folded)), real_cell(reads.a_query(reads.zooms), digits + 1),
            real_cell(reads.a_query(reads.tokens), digits),
            mean_bytes_cell(samples_folded == 0 ? std::nan("") : mean(moved_bytes, decoded_tokens))};
  }

 private:
  static double mean(std::int64_t sum, std::int64_t count) {
    return count == 0 ? std::nan("") : static_cast<double>(sum) / static_cast<double>(count);
  }
  static Cell mean_bytes_cell(double bytes) {
    return std::isnan(bytes) ? real_cell(bytes, 0) : bytes_cell(std::llround(bytes));
  }
};

}  // namespace kvkeep::cli
