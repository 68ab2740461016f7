// SPDX-License-Identifier: Apache-2.0
#include "serving.h"

#include <numeric>

#include "gpu_times.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "shapes.h"

namespace kvkeep::cli {
namespace {

struct NominalGpu {
  const char* name;
  double memory, bandwidth, products;  // bytes, bytes a second, dense bf16 operations a second
};

// As NVIDIA's data sheets have them, for the SXM modules.
constexpr NominalGpu kGpus[] = {{"a100-80", 80e9, 2.039e12, 312e12},
                                {"h100", 80e9, 3.35e12, 989e12},
                                {"h200", 141e9, 4.8e12, 989e12},
                                {"b200", 180e9, 8e12, 2250e12}};
constexpr const NominalGpu& kTimedGpu = kGpus[1];  // the card of gpu_times.h

// Kernels of a layer of a decode step: two norms, four products, RoPE, writing K and V, attention in two, activation.
constexpr double kKernelsOfALayer = 11;

std::int64_t rows_of(const ModelSpec& spec) { return std::ssize(spec.full_layers()) * std::int64_t{spec.kv_heads}; }

// Keys are read once, kept rows read and written once.
double event_bytes(std::int64_t before, std::int64_t after, double key_bytes, double slot_bytes) {
  return static_cast<double>(before) * key_bytes + 2 * static_cast<double>(after) * slot_bytes;
}

std::int64_t queries_of(const KVPolicy& policy) { return policy.needs().queries; }

// What a policy holds of one request, token by token.
class CourseMaker {
 public:
  CourseMaker(const ModelSpec& spec, const SequencePlan& plan, const OwnBytes& own, std::int64_t peak_slots)
      : spec_(spec),
        plan_(plan),
        heads_(static_cast<std::size_t>(spec.kv_heads)),
        lengths_(spec.full_layers().size() * heads_, 0),
        fixed_(own.queries + own.surprisal),
        slot_columns_((own.positions + own.credit + own.tally + own.given) / std::max<std::int64_t>(1, peak_slots)) {
    course.prompt = plan.prompt, course.length = plan.length;
    const auto all = static_cast<std::size_t>(plan.length) + 1;
    course.held.assign(all, 0), course.read.assign(all, 0), course.event.assign(all, 0);
    course.scratch = own.event;
    course.slot_bytes = plan.slot_bytes(spec);
    course.rows = rows_of(spec);
    course.token_bytes = course.slot_bytes * course.rows;
    course.sliding = sliding(plan.length, 1);
  }

  // Rows have grown up to `seen` tokens.
  void grow(std::int32_t seen) {
    std::vector<std::int32_t> longest;
    for (std::size_t r = 0; r < lengths_.size(); r += heads_)
      longest.push_back(*std::max_element(lengths_.begin() + static_cast<std::ptrdiff_t>(r),
                                          lengths_.begin() + static_cast<std::ptrdiff_t>(r + heads_)));
    const std::int64_t slots = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
    for (std::int32_t s = seen_ + 1; s <= seen; ++s) {
      const std::int32_t grown = s - seen_;
      const std::int64_t now = slots + grown * course.rows;
      std::int64_t pages = 0;
      for (const std::int32_t most : longest) pages += whole_pages(most + grown);
      const auto at = static_cast<std::size_t>(s);
      course.read[at] = now * course.slot_bytes + sliding(s, 1);
      course.held[at] =
          pages * spec_.kv_heads * course.slot_bytes + sliding(s, plan_.page_size) + fixed_ + slot_columns_ * now;
    }
    for (std::int32_t& length : lengths_) length += seen - seen_;
    seen_ = seen;
  }

  void cut(std::span<const std::int32_t> lengths, const std::optional<EventPrice>& price) {
    const std::int64_t before = std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0});
    lengths_.assign(lengths.begin(), lengths.end());
    course.event[static_cast<std::size_t>(seen_)] =
        price->seconds(before, std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0}));
  }

  Course course;

 private:
  [[nodiscard]] std::int64_t whole_pages(std::int32_t slots) const {
    return (std::int64_t{slots} + plan_.page_size - 1) / plan_.page_size * plan_.page_size;
  }
  // Bytes of layers that slide, in pages of `page` slots.
  [[nodiscard]] std::int64_t sliding(std::int32_t seen, std::int32_t page) const {
    std::int64_t slots = 0;
    for (const LayerSpec& layer : spec_.layers)
      if (layer.kind == LayerKind::sliding)
        slots += (std::int64_t{std::min(seen, layer.window)} + page - 1) / page * page;
    return slots * spec_.kv_heads * course.slot_bytes;
  }

  const ModelSpec& spec_;
  const SequencePlan& plan_;
  std::size_t heads_;
  std::vector<std::int32_t> lengths_;  // [full layers * Hkv]
  std::int64_t fixed_, slot_columns_;  // bytes: of kvkeep's own, at all times and for each slot
  std::int32_t seen_ = 0;
};

}  // namespace

std::vector<std::string> names_of_gpus() {
  std::vector<std::string> names;
  for (const NominalGpu& gpu : kGpus) names.emplace_back(gpu.name);
  return names;
}

GpuLimits gpu_called(const std::string& name) {
  for (const NominalGpu& gpu : kGpus)
    if (name == gpu.name)
      return {name, gpu.memory, gpu.bandwidth * (kReadRate / kTimedGpu.bandwidth),
              gpu.products * (kProductRate / kTimedGpu.products)};
  const std::vector<std::string> names = names_of_gpus();
  refuse("--gpu: '", name, "' is not known", did_you_mean(name, names), "; allowed ", joined(names),
         ", or --memory, --bandwidth and --flops");
}

EventPrice::EventPrice(const ModelSpec& spec, const KVPolicy& policy, Dtype dtype, const GpuLimits& gpu)
    : key_bytes_(2.0 * spec.key_dim), slot_bytes_(2.0 * (spec.key_dim + spec.value_dim)) {
  std::vector<std::string> known;
  bool counted = false;
  for (const EventTime& event : kEventTimes) {
    if (std::ranges::find(known, event.policy) == known.end()) known.emplace_back(event.policy);
    if (policy.name() != event.policy) continue;
    const ModelSpec timed = shape_called(event.shape);
    const std::int64_t rows = rows_of(timed);
    points_.push_back({event_bytes(rows * event.before, rows * event.after, 2.0 * timed.key_dim,
                                   2.0 * (timed.key_dim + timed.value_dim)),
                       event.us * 1e-6 * kReadRate / gpu.bandwidth});
    counted = event.counted;
  }
  constexpr const char* kOtherwise = ", full, or --event-us with a time of your own";
  KVKEEP_REQUIRE_AS(Unsupported, !points_.empty(), "--policy: no event of ", policy.name(),
                    " was measured on a GPU; allowed ", joined(known), kOtherwise);
  const std::int64_t queries = queries_of(*make_policy(text(policy.name(), ",budget=4096")));
  KVKEEP_REQUIRE_AS(Unsupported, queries_of(policy) == queries, "--policy: events of ", policy.name(),
                    " were measured with ", queries, " queries, this one reads ", queries_of(policy), "; allowed ",
                    queries, kOtherwise);
  KVKEEP_REQUIRE_AS(Unsupported, element_size(dtype) == 2 && numbers_of(dtype) == 1,
                    "--dtype: events were measured with numbers of two bytes; allowed bf16, f16", kOtherwise);
  std::ranges::sort(points_, {}, &Point::bytes);
  said_ = text(counted ? "counted from kernels that were measured on an " : "as measured on an ", kTimedOn);
}

double EventPrice::seconds(std::int64_t before, std::int64_t after) const {
  const double bytes = event_bytes(before, after, key_bytes_, slot_bytes_);
  const auto next = std::ranges::upper_bound(points_, bytes, {}, &Point::bytes);
  if (next == points_.begin()) return points_.front().seconds;
  const Point& low = *(next - 1);
  if (next == points_.end()) return low.seconds * bytes / low.bytes;
  return low.seconds + (next->seconds - low.seconds) * (bytes - low.bytes) / (next->bytes - low.bytes);
}

std::int64_t Course::most_held(std::int32_t from) const {
  return *std::max_element(held.begin() + from, held.end() - 1);
}

double Course::mean_read() const {
  const auto sum = std::accumulate(read.begin() + prompt + 1, read.end() - 1, std::int64_t{0});
  return static_cast<double>(sum) / decode_steps();
}

double Course::mean_event() const {
  return std::accumulate(event.begin() + prompt + 1, event.end() - 1, 0.0) / decode_steps();
}

Course course_of(const ModelSpec& spec, const KVPolicy& policy, const SequencePlan& plan,
                 const std::optional<EventPrice>& price) {
  SequencePlan forecast_plan = plan;
  if (policy.trigger().prefill != Trigger::Prefill::pieces) forecast_plan.piece = 0;
  const Forecast whole = forecast(spec, policy, forecast_plan);
  OwnBytes own;
  if (!policy.trigger().never) own = own_bytes(spec, policy, whole.peak_slots, plan.length, 2);
  CourseMaker made(spec, plan, own, whole.peak_slots);
  forecast(spec, policy, forecast_plan,
           [&](ForecastMoment moment, std::int32_t seen, std::span<const std::int32_t> lengths) {
             if (moment == ForecastMoment::after_event)
               made.cut(lengths, price);
             else
               made.grow(seen);
           });
  made.course.piece = plan.piece;
  made.course.shows_queries = policy.needs().queries > 0;
  return made.course;
}

Roofline roofline_of(const ModelSpec& spec, double parameters, const GpuLimits& gpu, double share) {
  const double of_timed = 1e-6 * spec.num_layers() / shape_called("llama8b").num_layers();
  return {.bandwidth = gpu.bandwidth,
          .products = gpu.products * share,
          .parameters = parameters,
          .gaps = kKernelsOfALayer * spec.num_layers() * kGapUs * 1e-6,
          .slot_operations = 2.0 * spec.group() * (spec.key_dim + spec.value_dim),
          .showing_one = kObservedOne * of_timed,
          .showing_more = (kObservedBatchUs - kObservedOne) / (kObservedBatch - 1) * of_timed};
}

double Roofline::seconds(const Work& work) const {
  const double tokens = static_cast<double>(work.decoding + work.prompt_tokens);
  return std::max(2 * parameters / bandwidth, 2 * parameters * tokens / products) + work.read / bandwidth +
         work.prompt_seconds + showing(work.shown) + gaps;
}

double Roofline::attention(const Course& course, std::int32_t tokens, std::int32_t end) const {
  const auto bytes = static_cast<double>(course.read[static_cast<std::size_t>(end)]);
  // A token sees those before it: on average half of the piece is not there yet.
  const double slots = bytes / static_cast<double>(course.slot_bytes),
               seen = std::max(slots / 2, slots - static_cast<double>(course.rows) * (tokens - 1) / 2);
  return std::max(bytes / bandwidth, tokens * seen * slot_operations / products);
}

double Roofline::showing(std::int64_t requests) const {
  return requests > 0 ? showing_one + static_cast<double>(requests - 1) * showing_more : 0;
}

double Roofline::prompt(const Course& course) const {
  double all = 0;
  for (std::int32_t seen = 0; seen < course.prompt;) {
    const std::int32_t tokens = course.piece_after(seen);
    seen += tokens;
    all += seconds({.decoding = 0,
                    .read = 0,
                    .prompt_tokens = tokens,
                    .prompt_seconds = attention(course, tokens, seen),
                    .shown = course.shows_queries ? 1 : 0}) +
           course.event[static_cast<std::size_t>(seen)];
  }
  return all;
}

double Roofline::decode(const Course& course, std::int64_t n) const {
  return seconds({.decoding = n,
                  .read = static_cast<double>(n) * course.mean_read(),
                  .prompt_tokens = 0,
                  .prompt_seconds = 0,
                  .shown = course.shows_queries ? n : 0});
}

std::int64_t requests_that_fit(const Course& course, std::int64_t room) {
  const std::int64_t after = course.most_after_prompt(), most = std::max(course.most_held(0), after);
  room -= course.scratch;
  return room < most ? 0 : 1 + (room - most) / after;
}

double break_even(const Roofline& roofline, const Course& course, std::int64_t n) {
  const auto own = roofline.showing(course.shows_queries ? n : 0) / static_cast<double>(n) + course.mean_event();
  return (course.mean_read() - static_cast<double>(course.sliding) + own * roofline.bandwidth) /
         static_cast<double>(course.token_bytes);
}

}  // namespace kvkeep::cli
