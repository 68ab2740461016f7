// SPDX-License-Identifier: Apache-2.0
#include "kvlab/diagnostics.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "kvkeep/core/error.h"

namespace kvkeep::report {
namespace {

using OrderedJson = nlohmann::ordered_json;

bool ascends(std::span<const std::int32_t> positions) {
  return std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) == positions.end();
}

OrderedJson number(double value) { return std::isfinite(value) ? OrderedJson(value) : OrderedJson(nullptr); }
OrderedJson number(const Ratio& ratio) { return number(ratio.value()); }

template <std::size_t N>
OrderedJson numbers(const std::array<Ratio, N>& ratios) {
  OrderedJson all = OrderedJson::array();
  for (const Ratio& ratio : ratios) all.push_back(number(ratio));
  return all;
}

template <std::size_t N>
void add_each(std::array<Ratio, N>& to, const std::array<Ratio, N>& from) {
  for (std::size_t i = 0; i < N; ++i) to[i].add(from[i]);
}

OrderedJson loss_json(const HeadLoss& loss) {
  return {
      {"recall", number(loss.held)}, {"past_recall", number(loss.past)}, {"output_error", number(loss.output_error())}};
}

/// Number of positions in each region of `size` below `end`.
std::vector<std::int32_t> count_by_region(std::span<const std::int32_t> positions, std::int32_t size,
                                          std::int32_t end) {
  std::vector<std::int32_t> counts(static_cast<std::size_t>(end / size));
  for (const std::int32_t p : positions) {
    const auto region = static_cast<std::size_t>(p / size);
    if (region < counts.size()) ++counts[region];
  }
  return counts;
}

double dot(const float* a, const float* b, std::int32_t n) {
  std::array<double, 4> sums{};
  std::int32_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (std::int32_t k = 0; k < 4; ++k)
      sums[static_cast<std::size_t>(k)] += static_cast<double>(a[i + k]) * static_cast<double>(b[i + k]);
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

}  // namespace

std::int64_t common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::int64_t both = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    both += a[i] == b[j];
    const bool next_a = a[i] <= b[j], next_b = b[j] <= a[i];
    i += next_a;
    j += next_b;
  }
  return both;
}

double iou(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  const std::int64_t both = common(a, b), either = static_cast<std::int64_t>(a.size() + b.size()) - both;
  return either == 0 ? 1.0 : static_cast<double>(both) / static_cast<double>(either);
}

double ngram_repetition(std::span<const std::int32_t> tokens, std::int32_t n) {
  KVKEEP_REQUIRE(n >= 1, "repetition: n is ", n, "; allowed 1 or more");
  if (tokens.size() < static_cast<std::size_t>(n)) return 0;
  const auto gram = [&](std::size_t at) { return tokens.subspan(at, static_cast<std::size_t>(n)); };
  std::vector<std::size_t> begins(tokens.size() - static_cast<std::size_t>(n) + 1);
  std::iota(begins.begin(), begins.end(), std::size_t{0});
  std::sort(begins.begin(), begins.end(),
            [&](std::size_t a, std::size_t b) { return std::ranges::lexicographical_compare(gram(a), gram(b)); });
  const auto last = std::unique(begins.begin(), begins.end(),
                                [&](std::size_t a, std::size_t b) { return std::ranges::equal(gram(a), gram(b)); });
  const auto distinct = static_cast<double>(last - begins.begin());
  return 1 - distinct / static_cast<double>(begins.size());
}

QueryLoss query_loss(const FullRow& row, const float* query, std::int32_t slots, std::span<const std::int32_t> kept,
                     std::int32_t next_position, double scale, std::vector<double>& scratch) {
  const auto dim = static_cast<std::size_t>(row.value_dim);
  scratch.resize(static_cast<std::size_t>(slots) + 2 * dim);
  const std::span weights{scratch.data(), static_cast<std::size_t>(slots)};
  double* full = scratch.data() + slots;
  double* held = full + dim;
  std::fill_n(full, 2 * dim, 0.0);
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (std::int32_t t = 0; t < slots; ++t) {
    weights[static_cast<std::size_t>(t)] = scale * dot(row.keys + t * row.key_stride, query, row.key_dim);
    top = std::max(top, weights[static_cast<std::size_t>(t)]);
  }
  for (double& w : weights) sum += w = std::exp(w - top);

  QueryLoss loss;
  auto next = kept.begin();
  for (std::int32_t t = 0; t < slots; ++t) {
    const double p = weights[static_cast<std::size_t>(t)] / sum;
    const bool past = t < next_position;
    while (past && next != kept.end() && *next < t) ++next;
    const bool stays = !past || (next != kept.end() && *next == t);
    loss.past += past ? p : 0;
    loss.past_held += past && stays ? p : 0;
    loss.held += stays ? p : 0;
    const float* value = row.values + t * row.value_stride;
    for (std::size_t d = 0; d < dim; ++d) full[d] += p * static_cast<double>(value[d]);
    if (!stays) continue;
    for (std::size_t d = 0; d < dim; ++d) held[d] += p * static_cast<double>(value[d]);
  }
  for (std::size_t d = 0; d < dim; ++d) {
    const double output = loss.held > 0 ? held[d] / loss.held : 0;
    loss.error_squared += (full[d] - output) * (full[d] - output);
    loss.output_squared += full[d] * full[d];
  }
  return loss;
}

double HeadLoss::output_error() const { return std::sqrt(error_squared.value()); }

void HeadLoss::add(const HeadLoss& other) {
  held.add(other.held);
  past.add(other.past);
  error_squared.add(other.error_squared);
}

void DiagnosticsResult::add(const DiagnosticsResult& other) {
  KVKEEP_REQUIRE(wipe_out.size() == other.wipe_out.size() && repetition.size() == other.repetition.size(),
                 "diagnostics: results of ", wipe_out.size(), " and ", other.wipe_out.size(), " regions, ",
                 repetition.size(), " and ", other.repetition.size(),
                 " n-grams cannot be added; allowed those of the same options");
  events += other.events;
  row_events += other.row_events;
  iou.add(other.iou);
  survival.add(other.survival);
  add_each(iou_by_depth, other.iou_by_depth);
  add_each(survival_by_depth, other.survival_by_depth);
  for (std::size_t i = 0; i < wipe_out.size(); ++i) {
    wipe_out[i].wiped.add(other.wipe_out[i].wiped);
    wipe_out[i].nearly.add(other.wipe_out[i].nearly);
    wipe_out[i].cumulative.add(other.wipe_out[i].cumulative);
  }
  longest_dropped.add(other.longest_dropped);
  most_dropped = std::max(most_dropped, other.most_dropped);
  add_each(coverage, other.coverage);
  add_each(coverage_cumulative, other.coverage_cumulative);
  middle.add(other.middle);
  middle_cumulative.add(other.middle_cumulative);
  newest_share.add(other.newest_share);
  segments.add(other.segments);
  segment_slots.add(other.segment_slots);
  quota_share.add(other.quota_share);
  suffix_mass.add(other.suffix_mass);
  for (std::size_t i = 0; i < repetition.size(); ++i) repetition[i].rate.add(other.repetition[i].rate);
  collapsed.add(other.collapsed);
  attention.add(other.attention);
  for (const auto& [where, loss] : other.attention_by_head) attention_by_head[where].add(loss);
}

std::string to_json(const DiagnosticsResult& r) {
  OrderedJson json{{"events", r.events},
                   {"row_events", r.row_events},
                   {"iou", number(r.iou)},
                   {"survival", number(r.survival)},
                   {"iou_by_depth", numbers(r.iou_by_depth)},
                   {"survival_by_depth", numbers(r.survival_by_depth)},
                   {"wipe_out", OrderedJson::array()},
                   {"longest_dropped", number(r.longest_dropped)},
                   {"most_dropped", r.most_dropped},
                   {"coverage", numbers(r.coverage)},
                   {"coverage_cumulative", numbers(r.coverage_cumulative)},
                   {"middle", number(r.middle)},
                   {"middle_cumulative", number(r.middle_cumulative)},
                   {"newest_share", number(r.newest_share)},
                   {"segments", number(r.segments)},
                   {"segment_slots", number(r.segment_slots)},
                   {"quota_share", number(r.quota_share)},
                   {"suffix_mass", number(r.suffix_mass)},
                   {"repetition", OrderedJson::array()},
                   {"collapsed", number(r.collapsed)},
                   {"attention", loss_json(r.attention)},
                   {"attention_by_head", OrderedJson::array()}};
  for (const WipeOut& w : r.wipe_out)
    json["wipe_out"].push_back({{"region", w.region},
                                {"wiped", number(w.wiped)},
                                {"nearly", number(w.nearly)},
                                {"cumulative", number(w.cumulative)}});
  for (const Repetition& one : r.repetition) json["repetition"].push_back({{"n", one.n}, {"rate", number(one.rate)}});
  for (const auto& [where, loss] : r.attention_by_head) {
    OrderedJson one{{"layer", where.first}, {"query_head", where.second}};
    one.update(loss_json(loss));
    json["attention_by_head"].push_back(std::move(one));
  }
  return json.dump();
}

Diagnostics::Diagnostics(DiagnosticsOptions options) : options_(std::move(options)) {
  KVKEEP_REQUIRE(options_.layers >= 1, "diagnostics: layers is ", options_.layers, "; allowed 1 or more");
  KVKEEP_REQUIRE(options_.window >= 0 && options_.sink >= 0, "diagnostics: window and sink are ", options_.window,
                 " and ", options_.sink, "; allowed 0 or more");
  for (const std::int32_t region : options_.regions) {
    KVKEEP_REQUIRE(region >= 1, "diagnostics: regions holds ", region, "; allowed 1 or more");
    result_.wipe_out.push_back({.region = region, .wiped = {}, .nearly = {}, .cumulative = {}});
  }
  for (const std::int32_t n : options_.ngrams) {
    KVKEEP_REQUIRE(n >= 1, "diagnostics: ngrams holds ", n, "; allowed 1 or more");
    result_.repetition.push_back({.n = n, .rate = {}});
  }
}

void Diagnostics::check(const RowEvent& row) const {
  const auto where = [&] { return text("diagnostics: layer ", row.layer, ", head ", row.head, ": "); };
  KVKEEP_REQUIRE(row.layer >= 0 && row.layer < options_.layers, "diagnostics: layer ", row.layer,
                 " is out of range; allowed 0 to ", options_.layers - 1);
  KVKEEP_REQUIRE(ascends(row.before) && ascends(row.kept), where(),
                 "positions do not ascend; allowed ascending and unique");
  KVKEEP_REQUIRE(row.before.empty() || (row.before.front() >= 0 && row.before.back() < row.next_position), where(),
                 "positions reach from ", row.before.empty() ? 0 : row.before.front(), " to ",
                 row.before.empty() ? 0 : row.before.back(),
                 "; allowed 0 to next_position - 1 = ", row.next_position - 1);
  KVKEEP_REQUIRE(common(row.before, row.kept) == static_cast<std::int64_t>(row.kept.size()), where(),
                 "a kept position is not in `before`; allowed those of `before`");
  KVKEEP_REQUIRE(row.mass.empty() || row.mass.size() == row.before.size(), where(), "mass has ", row.mass.size(),
                 " values; allowed none or ", row.before.size());
  KVKEEP_REQUIRE(row.segment_ends.size() == row.quotas.size(), where(), row.segment_ends.size(), " segments with ",
                 row.quotas.size(), " quotas; allowed one each");
  KVKEEP_REQUIRE(row.segment_ends.empty() || (ascends(row.segment_ends) && row.segment_ends.front() >= 1 &&
                                              row.segment_ends.back() == static_cast<std::int32_t>(row.before.size())),
                 where(), "segments do not end at ascending slots up to ", row.before.size(),
                 ", the row's length; allowed ends that do");
}

void Diagnostics::add_event(std::int64_t sequence, std::span<const RowEvent> rows) {
  for (const RowEvent& row : rows) check(row);
  ++result_.events;
  auto& last = last_[sequence];
  for (const RowEvent& row : rows) {
    ++result_.row_events;
    const auto [kept, first] = last.try_emplace({row.layer, row.head});
    if (!first) add_pair(row, kept->second);
    kept->second.assign(row.kept.begin(), row.kept.end());
    add_wipe_out(row);
    add_coverage(row);
    add_segments(row);
  }
}

void Diagnostics::end(std::int64_t sequence) { last_.erase(sequence); }

void Diagnostics::add_pair(const RowEvent& row, std::span<const std::int32_t> last) {
  const auto third = static_cast<std::size_t>(std::int64_t{3} * row.layer / options_.layers);
  const double overlap = report::iou(last, row.kept);
  result_.iou.add(overlap, 1);
  result_.iou_by_depth[third].add(overlap, 1);
  if (last.empty()) return;
  const double survived = static_cast<double>(common(last, row.kept)) / static_cast<double>(last.size());
  result_.survival.add(survived, 1);
  result_.survival_by_depth[third].add(survived, 1);
}

void Diagnostics::add_wipe_out(const RowEvent& row) {
  for (WipeOut& wipe_out : result_.wipe_out) {
    const std::int32_t size = wipe_out.region;
    const std::vector<std::int32_t> held = count_by_region(row.before, size, row.next_position),
                                    kept = count_by_region(row.kept, size, row.next_position);
    for (std::size_t k = 0; k < held.size(); ++k) {
      const std::int64_t begin = static_cast<std::int64_t>(k) * size;
      wipe_out.cumulative.add(kept[k] == 0 ? 1 : 0, 1);
      const bool live = std::int64_t{2} * held[k] >= size && begin >= options_.sink &&
                        begin + size <= row.next_position - options_.window;
      if (!live) continue;
      wipe_out.wiped.add(kept[k] == 0 ? 1 : 0, 1);
      wipe_out.nearly.add(kept[k] < kSoftWipeOut * held[k] ? 1 : 0, 1);
    }
  }
  std::int64_t run = 0, longest = 0;
  auto next = row.kept.begin();
  for (const std::int32_t p : row.before) {
    const bool stays = next != row.kept.end() && *next == p;
    next += stays;
    run = stays ? 0 : run + 1;
    longest = std::max(longest, run);
  }
  result_.longest_dropped.add(static_cast<double>(longest), 1);
  result_.most_dropped = std::max(result_.most_dropped, longest);
}

void Diagnostics::add_coverage(const RowEvent& row) {
  const std::int64_t end = row.next_position;
  if (end == 0) return;
  const auto bin = [&](std::int64_t p) { return static_cast<std::size_t>(kCoverageBins * p / end); };
  const auto in_middle = [&](std::int64_t p) { return 3 * p >= end && 3 * p < 2 * end; };
  for (const std::int32_t p : row.before) {
    result_.coverage[bin(p)].whole += 1;
    result_.middle.whole += in_middle(p) ? 1 : 0;
  }
  for (const std::int32_t p : row.kept) {
    result_.coverage[bin(p)].part += 1;
    result_.coverage_cumulative[bin(p)].part += 1;
    result_.middle.part += in_middle(p) ? 1 : 0;
    result_.middle_cumulative.part += in_middle(p) ? 1 : 0;
  }
  const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  for (std::int64_t k = 0; k < kCoverageBins; ++k)
    result_.coverage_cumulative[static_cast<std::size_t>(k)].whole +=
        static_cast<double>(up((k + 1) * end, kCoverageBins) - up(k * end, kCoverageBins));
  result_.middle_cumulative.whole += static_cast<double>(up(2 * end, 3) - up(end, 3));
}

void Diagnostics::add_segments(const RowEvent& row) {
  const std::int32_t suffix = row.next_position - options_.window;
  const auto newest = row.kept.end() - std::lower_bound(row.kept.begin(), row.kept.end(), suffix);
  result_.newest_share.add(static_cast<double>(newest), static_cast<double>(row.kept.size()));
  if (!row.mass.empty()) {
    const auto first = std::lower_bound(row.before.begin(), row.before.end(), suffix) - row.before.begin();
    result_.suffix_mass.add(std::accumulate(row.mass.begin() + first, row.mass.end(), 0.0), 1);
  }
  if (row.segment_ends.empty()) return;
  result_.segments.add(static_cast<double>(row.segment_ends.size()), 1);
  result_.segment_slots.add(static_cast<double>(row.before.size()), static_cast<double>(row.segment_ends.size()));
  std::int32_t begin = 0;
  for (std::size_t i = 0; i < row.segment_ends.size(); begin = row.segment_ends[i++])
    result_.quota_share.add(static_cast<double>(row.quotas[i]) / static_cast<double>(row.segment_ends[i] - begin), 1);
}

void Diagnostics::add_generated(std::span<const std::int32_t> tokens) {
  for (Repetition& one : result_.repetition) one.rate.add(ngram_repetition(tokens, one.n), 1);
  if (!options_.ngrams.empty())
    result_.collapsed.add(ngram_repetition(tokens, options_.ngrams.front()) > kCollapsed ? 1 : 0, 1);
}

void Diagnostics::add_query(std::int32_t layer, std::int32_t query_head, const QueryLoss& loss) {
  const HeadLoss one{.held = {loss.held, 1},
                     .past = {loss.past_held, loss.past},
                     .error_squared = {loss.error_squared, loss.output_squared}};
  result_.attention.add(one);
  result_.attention_by_head[{layer, query_head}].add(one);
}

void Diagnostics::merge(const Diagnostics& other) {
  KVKEEP_REQUIRE(options_.layers == other.options_.layers && options_.regions == other.options_.regions &&
                     options_.ngrams == other.options_.ngrams && options_.window == other.options_.window &&
                     options_.sink == other.options_.sink,
                 "diagnostics: results with different options cannot be merged; allowed the same options in both");
  for (const auto& [sequence, rows] : other.last_)
    KVKEEP_REQUIRE(!last_.contains(sequence), "diagnostics: sequence ", sequence,
                   " is open in both; allowed in only one, or call end() first");
  result_.add(other.result_);
  last_.insert(other.last_.begin(), other.last_.end());
}

}  // namespace kvkeep::report
