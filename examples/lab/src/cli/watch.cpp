// SPDX-License-Identifier: Apache-2.0
#include "watch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>

#include "kvkeep/core/error.h"
#include "kvkeep/core/model_spec.h"
#include "kvlab/memory_left.h"
#include "oracle.h"

namespace kvkeep::cli {

Watch::Watch(const ModelSpec& spec, std::int64_t traced)
    : spec_(spec), traced_(traced), diagnostics_({.layers = spec.num_layers()}) {}

void Watch::see(const lm::EventSight& sight) {
  const RowTable& table = sight.plan.table;
  const Decision& decision = sight.plan.decision;
  if (!decision.keep) return;
  const float* mass = decision.allotment && decision.allotment->mass.data.defined()
                          ? decision.allotment->mass.data.data<float>()
                          : nullptr;
  std::deque<std::vector<std::int32_t>> kept;
  std::map<SequenceId, std::vector<report::RowEvent>> events;
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    const Row& row = table.rows[r];
    std::vector<std::int32_t>& positions = kept.emplace_back();
    for (const std::int32_t slot : decision.keep->row(r)) positions.push_back(row.positions[slot]);
    const auto length = static_cast<std::size_t>(row.length);
    report::RowEvent event{.layer = row.layer,
                           .head = row.head,
                           .next_position = table.groups[r / static_cast<std::size_t>(spec_.kv_heads)].next_position,
                           .before = {row.positions, length},
                           .kept = positions};
    if (decision.allotment && !decision.allotment->ends[r].empty()) {
      event.segment_ends = decision.allotment->ends[r];
      event.quotas = decision.allotment->quotas[r];
      if (mass != nullptr) event.mass = {mass + row.first, length};
    }
    events[sight.view.sequences[static_cast<std::size_t>(row.sequence)]].push_back(event);
  }
  for (const auto& [sequence, rows] : events) {
    diagnostics_.add_event(sequence, rows);
    open_[sequence] = true;
    if (sequence >= traced_) continue;
    KeptRows& remembered = kept_[sequence].emplace_back(KeptRows{.next_position = rows.front().next_position});
    for (const report::RowEvent& row : rows) remembered.rows.emplace_back(row.kept.begin(), row.kept.end());
  }
}

void Watch::end() {
  for (const auto& [sequence, ignored] : open_) diagnostics_.end(sequence);
  open_.clear();
}

namespace {

// The tokens that a full run of `ids` runs, once there is memory for what it holds.
std::int32_t tokens_of_full_run(const ModelSpec& spec, const std::vector<std::int32_t>& ids) {
  const std::int64_t numbers = std::int64_t{spec.query_heads + spec.kv_heads} * (spec.key_dim + spec.value_dim);
  lm::require_memory("--diagnostics", text("a full run of ", ids.size(), " tokens"),
                     static_cast<double>(ids.size()) * static_cast<double>(numbers) * spec.num_layers() * sizeof(float),
                     "shorter texts, or --diagnostics-samples 0");
  return static_cast<std::int32_t>(ids.size()) - 1;
}

}  // namespace

FullRun::FullRun(lm::Decoder& decoder, const std::vector<std::int32_t>& tokens)
    : spec_(decoder.spec()), tokens_(tokens_of_full_run(spec_, tokens)), cache_(decoder.make_cache(1, tokens_)) {
  const std::vector<std::int32_t> full_layers = spec_.full_layers();
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens_));
  std::iota(positions.begin(), positions.end(), 0);
  const std::int64_t heads = spec_.query_heads, dim = spec_.key_dim;
  std::vector<float> cosines(static_cast<std::size_t>(dim / 2)), sines(cosines.size());
  lm::StepOptions options{.logits = lm::Logits::none};
  options.on_layer = [&](const lm::LayerSight& sight) {
    if (!std::binary_search(full_layers.begin(), full_layers.end(), sight.layer)) return;
    const float* from = sight.queries.const_data_ptr<float>();
    std::vector<float>& queries = queries_.emplace_back(from, from + tokens_ * heads * dim);
    const RopeSpec& rope = spec_.rope_of(sight.layer);
    for (std::int32_t t = 0; t < tokens_; ++t) {
      rope_at(rope, t, cosines.data(), sines.data());
      for (std::int64_t h = 0; h < heads; ++h)
        rope_rotate(rope.style, rope.rotary_dim() / 2, cosines.data(), sines.data(),
                    queries.data() + (t * heads + h) * dim);
    }
  };
  options.view = [&](const lm::LayerSight& sight, const Attended& attended) {
    if (!std::binary_search(full_layers.begin(), full_layers.end(), sight.layer)) return;
    const float* from = attended.out.data<float>();
    outputs_.emplace_back(from, from + attended.out.numel());
  };
  const std::vector<std::int32_t> ids(tokens.begin(), tokens.end() - 1), whole{0, tokens_}, row{0}, none{0};
  decoder.forward({ids, whole, positions, row, none}, cache_, options);
}

void FullRun::compare(const std::vector<KeptRows>& events, report::Diagnostics& to) const {
  if (events.empty()) return;
  const std::vector<std::int32_t> full_layers = spec_.full_layers();
  const std::int32_t first = events.front().next_position, kv_heads = spec_.kv_heads, group = spec_.group();
  const std::int64_t dim = spec_.key_dim, queries = std::max(0, tokens_ - first);
  std::vector<std::vector<report::QueryLoss>> losses(
      full_layers.size() * static_cast<std::size_t>(kv_heads));  // [row] [query, head of the group]
  parallel_for(0, static_cast<std::int64_t>(losses.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> scratch;
    for (std::int64_t r = begin; r < end; ++r) {
      const auto index = static_cast<std::size_t>(r), layer = index / static_cast<std::size_t>(kv_heads);
      const std::int64_t head = r % kv_heads;
      const lm::LayerCache& cache = cache_[static_cast<std::size_t>(full_layers[layer])];
      const Tensor &keys = cache.keys, &values = cache.values;
      const report::FullRow row{.keys = keys.data<float>() + head * keys.stride(1),
                                .key_stride = keys.stride(2),
                                .values = values.data<float>() + head * values.stride(1),
                                .value_stride = values.stride(2),
                                .key_dim = spec_.key_dim,
                                .value_dim = spec_.value_dim};
      std::size_t event = 0;
      for (std::int32_t t = first; t < tokens_; ++t) {
        while (event + 1 < events.size() && events[event + 1].next_position <= t) ++event;
        for (std::int64_t g = 0; g < group; ++g) {
          const float* query = queries_[layer].data() + (t * std::int64_t{spec_.query_heads} + head * group + g) * dim;
          losses[index].push_back(report::query_loss(row, query, t + 1, events[event].rows[index],
                                                     events[event].next_position, spec_.scale(), scratch));
        }
      }
    }
  });
  for (std::size_t r = 0; r < losses.size(); ++r)
    for (std::int64_t i = 0; i < queries * group; ++i)
      to.add_query(full_layers[r / static_cast<std::size_t>(kv_heads)],
                   static_cast<std::int32_t>(r % static_cast<std::size_t>(kv_heads)) * group +
                       static_cast<std::int32_t>(i % group),
                   losses[r][static_cast<std::size_t>(i)]);
}

void OutputWatch::see(const lm::EventSight& sight) {
  for (const Cut& cut : sight.plan.cuts) cut_.insert(cut.sequence);
}

void OutputWatch::see(const lm::AttentionSight& sight) {
  const lm::LayerSight& layer = sight.layer;
  const auto place = std::ranges::lower_bound(full_layers_, layer.layer);
  if (place == full_layers_.end() || *place != layer.layer) return;
  const std::int64_t heads = sight.attended.out.size(1), dim = sight.attended.out.size(2);
  for (std::size_t i = 0; i < sight.sequences.size(); ++i) {
    const SequenceId id = sight.sequences[i];
    for (std::int32_t t = layer.indptr[i]; t < layer.indptr[i + 1]; ++t) {
      const std::span<const float> full = runs_[static_cast<std::size_t>(id)].output(
          static_cast<std::size_t>(place - full_layers_.begin()), layer.positions[static_cast<std::size_t>(t)]);
      float* out = sight.attended.out.data<float>() + t * heads * dim;
      for (std::int64_t h = 0; cut_.contains(id) && h < heads; ++h) {
        report::QueryLoss loss{.held = std::numeric_limits<double>::quiet_NaN()};
        for (std::int64_t d = h * dim; d < (h + 1) * dim; ++d) {
          const double whole = full[static_cast<std::size_t>(d)], difference = whole - out[d];
          loss.error_squared += difference * difference;
          loss.output_squared += whole * whole;
        }
        to_.add_query(layer.layer, static_cast<std::int32_t>(h), loss);
      }
      std::ranges::copy(full, out);
    }
  }
}

void require_host_memory(const ModelOptions& model, const char* command) {
  KVKEEP_REQUIRE_AS(Unsupported, model.device.name == "cpu", command,
                    ": --diagnostics reads queries and outputs of attention in host memory; given --device ",
                    model.device.name, "; allowed cpu");
}

WatchedTexts::WatchedTexts(lm::Decoder& decoder, const ModelOptions& model, const std::vector<Contest>& contests,
                           std::int64_t traced)
    : decoder_(decoder), model_(model), contests_(contests), traced_(traced) {
  for (const Contest& contest : contests) {
    watches_.emplace_back(decoder.spec(), traced);
    gaps_.emplace_back(traced == 0       ? "--diagnostics-samples is 0"
                       : !contest.folds  ? ""
                       : contest.narrows ? "the policy folds and narrows, so a full run has other queries"
                                         : "queries read folded spans, not a set of held slots");
  }
}

std::function<void(const lm::EventSight&)> WatchedTexts::hook(std::size_t contest) {
  return [&watch = watches_[contest]](const lm::EventSight& sight) { watch.see(sight); };
}

void WatchedTexts::fed(std::size_t contest, SequenceId sequence, lm::Request request, const lm::Completion& done) {
  if (sequence >= traced_ || watches_[contest].kept(sequence).empty()) return;
  const bool twice = done.prompt && done.prompt->second_pass;
  if (twice || (contests_[contest].folds && request.forced_at_once)) {
    gaps_[contest] = twice ? "the prompt ran twice, with other positions" : "spans fold, and the question ran at once";
    return;
  }
  std::vector<std::int32_t> ids = request.prompt;
  ids.insert(ids.end(), request.forced.begin(), request.forced.end());
  texts_[sequence][std::move(ids)].push_back(contest);
  fed_.emplace(std::pair(sequence, contest), std::move(request));
}

void WatchedTexts::end(Progress& progress, std::vector<Diagnosed>& to) {
  progress.label("what attention loses");
  for (const auto& [sequence, texts] : texts_)
    for (const auto& [ids, those] : texts) {
      const FullRun full(decoder_, ids);
      for (const std::size_t c : those) {
        Watch& watch = watches_[c];
        if (!contests_[c].folds) {
          full.compare(watch.kept(sequence), watch.diagnostics());
        } else if (!contests_[c].narrows) {  // else the full run has other queries
          OutputWatch outputs(decoder_.spec(), {&full, 1}, watch.diagnostics());
          static_cast<void>(
              lm::generate(decoder_, make_untold(contests_[c].policy), {fed_.at({sequence, c})},
                           {.cache_dtype = model_.dtype(),
                            .hooks = {.on_attention = [&](const lm::AttentionSight& sight) { outputs.see(sight); },
                                      .on_event = [&](const lm::EventSight& sight) { outputs.see(sight); }}}));
        }
      }
    }
  const bool first = to.empty();
  for (std::size_t c = 0; c < watches_.size(); ++c) {
    watches_[c].end();
    if (first)
      to.push_back({.result = watches_[c].diagnostics().result(), .gaps = {.attention = gaps_[c], .repetition = {}}});
    else
      to[c].result.add(watches_[c].diagnostics().result());
  }
}

}  // namespace kvkeep::cli
