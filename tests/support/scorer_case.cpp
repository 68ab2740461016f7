// SPDX-License-Identifier: Apache-2.0
#include "scorer_case.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>

#include "arrays.h"
#include "kvkeep/score/window_attention.h"
#include "loop_threads.h"

namespace kvkeep::testing {
namespace {

using oracle::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float rounded(double x, Dtype dtype) {
  const auto f = static_cast<float>(x);
  if (dtype == Dtype::f16) return static_cast<float>(Half(f));
  if (dtype == Dtype::bf16) return static_cast<float>(BFloat16(f));
  return f;
}

/// Writes a number that was rounded to the dtype before.
void put(std::byte* to, float x, Dtype dtype) {
  if (dtype == Dtype::f16) {
    const Half h(x);
    std::memcpy(to, &h, sizeof h);
  } else if (dtype == Dtype::bf16) {
    const BFloat16 h(x);
    std::memcpy(to, &h, sizeof h);
  } else {
    std::memcpy(to, &x, sizeof x);
  }
}

enum class Keys : int { normal, heavy_tailed, crowded, few_kinds, with_zeros, loud_sink, alternating };
constexpr const char* kKeysNames[] = {"normal",    "heavy-tailed", "crowded", "few kinds of",
                                      "some zero", "loud first",   "opposite"};

std::int32_t random_length(Random& random, std::int32_t longest) {
  std::int32_t T = 0;
  switch (random.between(0, 5)) {
    case 0:
      T = random.between(1, 4);
      break;
    case 1:
      T = 1 << random.between(1, 7);
      break;
    case 2:
      T = random.between(1, longest);
      break;
    default:
      T = random.between(4, 60);
  }
  return std::min(T, longest);
}

/// Positions of T slots below `next`; the newest `fresh` without gaps, as they are since the last event.
std::vector<int> random_positions(Random& random, std::int32_t T, std::int32_t next, std::int32_t fresh) {
  fresh = std::min(fresh, T);
  std::vector<int> positions;
  std::int32_t wanted = T - fresh;
  for (std::int32_t p = 0; p < next - fresh && wanted > 0; ++p) {
    const std::int32_t left = next - fresh - p;
    if (wanted == left || random.unit() * left < wanted) positions.push_back(p), --wanted;
  }
  for (std::int32_t p = next - fresh; p < next; ++p) positions.push_back(p);
  return positions;
}

void fill_slots(Random& random, Keys kind, oracle::ScorerHead& head, int D, int Dv, Dtype key_dtype,
                Dtype value_dtype) {
  const auto vector = [&](int dim, double size) {
    std::vector<double> v(static_cast<std::size_t>(dim));
    for (double& x : v) x = size * random.normal();
    return v;
  };
  std::vector<std::vector<double>> centres;
  for (int i = 0; i < 3; ++i) centres.push_back(vector(D, 1));
  std::vector<std::pair<std::vector<double>, std::vector<double>>> kinds;
  for (int i = 0; i < 4; ++i) kinds.emplace_back(vector(D, 1), vector(Dv, 1));
  for (int t = 0; t < head.T; ++t) {
    std::vector<double> key = vector(D, 1), value = vector(Dv, 1);
    switch (kind) {
      case Keys::normal:
        break;
      case Keys::heavy_tailed: {
        const double size = std::exp(1.2 * random.normal());
        for (double& x : key) x *= size;
        break;
      }
      case Keys::crowded: {  // close to one of three directions: much of it above any threshold of similarity
        const auto& centre = centres[static_cast<std::size_t>(random.between(0, 2))];
        for (std::size_t d = 0; d < key.size(); ++d) key[d] = centre[d] + 0.5 * key[d];
        break;
      }
      case Keys::few_kinds:
        std::tie(key, value) = kinds[static_cast<std::size_t>(random.between(0, 3))];
        break;
      case Keys::with_zeros:
        if (random.chance(0.2)) std::fill(key.begin(), key.end(), 0.0);
        if (random.chance(0.1)) std::fill(value.begin(), value.end(), 0.0);
        break;
      case Keys::loud_sink:
        if (t == 0)
          for (double& x : key) x *= 20;
        break;
      case Keys::alternating:
        for (std::size_t d = 0; d < key.size(); ++d) key[d] = (t % 2 == 0 ? 1 : -1) * centres[0][d];
        break;
    }
    for (const double x : key) head.keys.push_back(rounded(x, key_dtype));
    for (const double x : value) head.values.push_back(rounded(x, value_dtype));
  }
}

/// Turns by position (or back), in double.
std::vector<double> turned(const oracle::ScorerInput& in, const double* x, int position, bool back) {
  std::vector<double> out(x, x + in.D);
  const auto F = static_cast<int>(in.inv_freq.size());
  for (int f = 0; f < F; ++f) {
    const double angle = position * in.inv_freq[static_cast<std::size_t>(f)] * (back ? -1 : 1),
                 a = back ? 1 / in.attention_scaling : in.attention_scaling;
    const int i = in.interleaved ? 2 * f : f, j = in.interleaved ? 2 * f + 1 : f + F;
    out[static_cast<std::size_t>(i)] = a * (x[i] * std::cos(angle) - x[j] * std::sin(angle));
    out[static_cast<std::size_t>(j)] = a * (x[j] * std::cos(angle) + x[i] * std::sin(angle));
  }
  return out;
}

Dtype random_dtype(Random& random) { return random.one_of({Dtype::f32, Dtype::f32, Dtype::f16, Dtype::bf16}); }

/// Calls body(arrangement row index, row, head, slot) for every slot whose score counts.
template <class Body>
void each_counted_slot(const ScorerArrangement& arrangement, Body&& body) {
  for (const Row& row : arrangement.table().rows) {
    const oracle::ScorerHead& head = arrangement.input(row).heads[static_cast<std::size_t>(row.head)];
    if (!head.due) continue;
    for (std::int32_t t = 0; t < row.length; ++t)
      if (!head.guarded(t)) body(row, head, t);
  }
}

std::uint32_t bits(float x) {
  std::uint32_t b = 0;
  std::memcpy(&b, &x, sizeof b);
  return b;
}

/// Scores of every counted slot, to be looked up by layer, sequence of the case and head.
struct Bits {
  std::vector<std::int32_t> keys;  ///< layer, sequence, head, slot
  std::vector<std::uint32_t> values;
};

Bits bits_of(const Scorer& scorer, const ScorerArrangement& arrangement, std::int32_t without = -1) {
  const Scores scores = scores_of(scorer, arrangement);
  const float* g = scores.data.data<float>();
  Bits out;
  std::vector<std::pair<std::vector<std::int32_t>, std::uint32_t>> all;
  each_counted_slot(arrangement, [&](const Row& row, const oracle::ScorerHead&, std::int32_t t) {
    if (arrangement.sequence_of(row) != without)
      all.push_back({{row.layer, arrangement.sequence_of(row), row.head, t}, bits(g[row.first + t])});
  });
  std::sort(all.begin(), all.end());
  for (const auto& [key, value] : all) {
    out.keys.insert(out.keys.end(), key.begin(), key.end());
    out.values.push_back(value);
  }
  return out;
}

/// The first slot that differs; empty: none does.
std::string difference(const Bits& got, const Bits& want) {
  if (got.keys != want.keys) return "other slots were scored";
  for (std::size_t i = 0; i < got.values.size(); ++i) {
    if (got.values[i] == want.values[i]) continue;
    std::ostringstream out;
    const std::int32_t* key = got.keys.data() + 4 * i;
    out << "layer " << key[0] << ", sequence " << key[1] << ", head " << key[2] << ", slot " << key[3] << " has bits "
        << std::hex << got.values[i] << ", not " << want.values[i];
    return out.str();
  }
  return {};
}

}  // namespace

ScorerCase::ScorerCase(std::uint64_t seed, const ScorerCaseOptions& options) : seed_(seed) {
  Random random(seed * 0x9e3779b9U + 17);
  const auto dim = std::max(options.least_dim, random.one_of({64, 80, 96, 128, 256, 1, 2, 3, 7, 16, 16, 33}));
  const auto kv_heads = dim >= 96 ? random.between(1, 2) : random.one_of({1, 1, 2, 3, 4});
  const auto group = random.one_of({1, 2, 3, 4, 7, 8});
  spec_ = {.query_heads = kv_heads * group,
           .kv_heads = kv_heads,
           .key_dim = dim,
           .value_dim = random.chance(0.5) ? dim : random.one_of({1, 5, 24, 64}),
           .softmax_scale = random.chance(0.7) ? 0 : 0.3 / std::sqrt(dim),
           .rope = {},
           .layers = {}};
  spec_.rope.style = random.chance(0.5) ? RopeStyle::half : RopeStyle::interleaved;
  spec_.rope.attention_scaling = random.chance(0.3) ? 1.2 : 1;
  const int pairs = random.chance(0.15) ? 0 : random.chance(0.2) ? dim / 4 : dim / 2;
  for (int f = 0; f < pairs; ++f) spec_.rope.inv_freq.push_back(std::pow(1e4, -1.0 * f / pairs));
  if (spec_.rope.inv_freq.empty()) spec_.rope = RopeSpec::absent();  // nothing turns, nothing is scaled
  const int full = dim >= 96 ? random.between(1, 2) : random.between(1, 3);
  Random turner(seed * 0x2545f491U + 7);
  for (int l = 0; l < full; ++l) {
    if (random.chance(0.2)) spec_.layers.push_back({.kind = LayerKind::other});
    spec_.layers.push_back({});
    std::optional<RopeSpec>& own = spec_.layers.back().rope;
    if (options.ropes == oracle::Ropes::any && turner.chance(0.3)) own = RopeSpec::absent();
    if (options.ropes == oracle::Ropes::any && dim >= 4 && turner.chance(0.2)) own = {.inv_freq = {1.5, 0.02}};
    if (options.ropes == oracle::Ropes::same_pairs && !spec_.rope.inv_freq.empty() && turner.chance(0.5)) {
      own = spec_.rope;
      own->attention_scaling = 1.4;
      for (double& frequency : own->inv_freq) frequency *= 0.7;
    }
  }
  Random sinker(seed * 0x6a09e667U + 3);  // numbers of the cases as they were before there were sinks and caps
  if (options.caps && sinker.chance(0.3)) spec_.logit_cap = sinker.one_of({1.0, 4.0, 50.0});
  for (LayerSpec& layer : spec_.layers)
    if (layer.kind == LayerKind::full && sinker.chance(0.4))
      for (std::int32_t h = 0; h < spec_.query_heads; ++h)
        layer.sinks.push_back(sinker.chance(0.2) ? -kInfinity : static_cast<float>(1 + 3 * sinker.normal()));
  basis_ = random.chance(0.5) ? QueryBasis::pre_rope : QueryBasis::post_rope;
  key_dtype_ = random_dtype(random);
  value_dtype_ = random.chance(0.7) ? key_dtype_ : random_dtype(random);
  query_dtype_ = random_dtype(random);
  const int hidden = random.between(1, 12);
  for (std::size_t l = 0; l < spec_.layers.size(); ++l) {
    projections_.push_back(empty({hidden, spec_.query_heads * spec_.value_dim}, Dtype::f32));
    float* w = projections_.back().data<float>();
    for (std::int64_t i = 0; i < projections_.back().numel(); ++i) w[i] = static_cast<float>(0.2 * random.normal());
  }

  std::ostringstream told;
  told << "seed " << seed << ": heads " << spec_.query_heads << '/' << kv_heads << ", D " << dim << '/'
       << spec_.value_dim << ", " << name_of(key_dtype_) << " keys, " << name_of(value_dtype_) << " values, "
       << name_of(query_dtype_) << " queries " << (basis_ == QueryBasis::pre_rope ? "before" : "after") << " RoPE ("
       << name_of(spec_.rope.style) << ", " << pairs << " pairs, times " << spec_.rope.attention_scaling << "), "
       << full << " layers, cap " << spec_.logit_cap;
  const int sequences = random.between(1, dim >= 96 ? 2 : 4);
  for (int s = 0; s < sequences; ++s) {
    const Keys kind = static_cast<Keys>(random.between(0, 6));
    const bool ragged = options.ragged && random.chance(0.2);
    const std::int32_t T = random_length(random, options.longest);
    const std::int32_t next = T + (random.chance(0.5) ? 0 : random.between(1, 3 * T));
    const std::int32_t seen =
        std::min({next, options.most_queries, random.one_of({0, 1, 1, 2, 5, 5, 8, 8, 9, 16, 33, 70})});
    const double size = random.one_of({0.3, 1.0, 1.0, 3.0});
    const std::int32_t budget = random.chance(0.1) ? T : random.between(1, T);
    const std::int32_t sink = random.one_of({0, 0, 1, 4}), recent = random.one_of({0, 0, 1, 8, 32}),
                       fresh = random.one_of({1, 8, 32, T});
    const std::int32_t prompt = random.between(0, next);
    told << "; " << T << (ragged ? " or fewer" : "") << " -> " << budget << " slots of " << next << ", " << seen
         << " queries, " << kKeysNames[static_cast<int>(kind)] << " keys, sink " << sink << ", recent " << recent
         << ", prompt " << prompt;
    std::vector<oracle::ScorerInput>& layers = inputs_.emplace_back();
    for (std::int32_t l = 0; l < spec_.num_layers(); ++l) {
      if (spec_.layers[static_cast<std::size_t>(l)].kind != LayerKind::full) continue;
      oracle::ScorerInput& in = layers.emplace_back();
      in.layer = l;
      in.Hq = spec_.query_heads, in.Hkv = kv_heads, in.D = dim, in.Dv = spec_.value_dim;
      in.scale = spec_.softmax_scale > 0 ? spec_.softmax_scale : 1 / std::sqrt(static_cast<double>(dim));
      in.cap = spec_.logit_cap;
      const std::vector<float>& sinks = spec_.layers[static_cast<std::size_t>(l)].sinks;
      in.sinks.assign(sinks.begin(), sinks.end());
      in.P = next, in.prompt = prompt;
      const RopeSpec& rope = spec_.rope_of(l);
      in.inv_freq = rope.inv_freq;
      in.attention_scaling = rope.attention_scaling;
      in.interleaved = rope.style == RopeStyle::interleaved;
      in.hidden = hidden;
      const Tensor& projection = projections_[static_cast<std::size_t>(l)];
      in.output_projection.assign(projection.data<float>(), projection.data<float>() + projection.numel());
      for (int h = 0; h < kv_heads; ++h) {
        oracle::ScorerHead& head = in.heads.emplace_back();
        head.T = ragged ? random.between(1, T) : T;
        head.positions = random_positions(random, head.T, next, fresh);
        fill_slots(random, kind, head, in.D, in.Dv, key_dtype_, value_dtype_);
        for (int t = random.chance(0.3) ? head.T : random.between(0, head.T); t > 0; --t)
          head.tally.push_back(static_cast<float>(random.unit()));
        Random giver(seed * 0x2545f491U + static_cast<std::uint64_t>(l) * 31 + static_cast<std::uint64_t>(h));
        for (int t = 0; t < head.T; ++t) head.given.push_back(static_cast<float>(3 * giver.normal() - 4));
        head.budget = ragged ? random.between(1, T) : budget;
        head.due = head.T > head.budget;
        head.sinks = std::min(sink, std::min(head.budget, head.T));
        head.recents = std::min(recent, std::min(head.budget, head.T) - head.sinks);
      }
      for (std::int32_t i = 0; i < seen; ++i) in.query_positions.push_back(next - seen + i);
      for (int h = 0; h < in.Hq; ++h)
        for (std::int32_t i = 0; i < seen; ++i) {
          std::vector<double> given;
          for (int d = 0; d < dim; ++d)
            given.push_back(rounded(
                size * (random.unit() + random.unit() + random.unit() - 1.5) * 2 + (d == 0 ? 0.5 : 0), query_dtype_));
          const bool pre = basis_ == QueryBasis::pre_rope;
          const std::vector<double> other =
              turned(in, given.data(), in.query_positions[static_cast<std::size_t>(i)], !pre);
          in.queries_pre.insert(in.queries_pre.end(), pre ? given.begin() : other.begin(),
                                pre ? given.end() : other.end());
          in.queries.insert(in.queries.end(), pre ? other.begin() : given.begin(), pre ? other.end() : given.end());
        }
    }
  }
  description_ = told.str();
}

ScorerArrangement ScorerCase::arranged(const Layout& layout) const { return {*this, layout}; }
ScorerArrangement ScorerCase::arranged() const { return {*this, {}}; }

const oracle::ScorerInput& ScorerArrangement::input(const Row& row) const {
  const auto& layers = from_->inputs_[static_cast<std::size_t>(sequence_of(row))];
  return *std::find_if(layers.begin(), layers.end(),
                       [&](const oracle::ScorerInput& in) { return in.layer == row.layer; });
}

ScorerArrangement::ScorerArrangement(const ScorerCase& from, const ScorerCase::Layout& layout)
    : from_(&from), order_(layout.order) {
  const ModelSpec& spec = from.spec_;
  if (order_.empty()) {
    order_.resize(from.inputs_.size());
    std::iota(order_.begin(), order_.end(), 0);
  }
  const auto n = static_cast<std::int32_t>(order_.size());
  Random random(from.seed_ + 0x5eedU * static_cast<std::uint64_t>(n) + (layout.transposed ? 7 : 0));
  std::vector<SequenceId> ids;
  std::vector<std::int32_t> lengths, starts, places(static_cast<std::size_t>(n));
  std::iota(places.begin(), places.end(), 0);
  if (!layout.tight) {
    for (std::int32_t& p : places) ++p;
    for (std::size_t i = places.size(); i > 1; --i)
      std::swap(places[i - 1], places[static_cast<std::size_t>(random.between(0, static_cast<int>(i) - 1))]);
  }
  std::int32_t capacity = 1;
  for (const std::int32_t s : order_) {
    ids.push_back(100 + s);
    starts.push_back(layout.tight ? 0 : random.between(0, 17));
    std::size_t full = 0;
    for (std::int32_t l = 0; l < spec.num_layers(); ++l)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const bool cached = spec.layers[static_cast<std::size_t>(l)].kind == LayerKind::full;
        lengths.push_back(cached ? from.inputs_[static_cast<std::size_t>(s)][full].heads[static_cast<std::size_t>(h)].T
                                 : 0);
        capacity = std::max(capacity, starts.back() + lengths.back() + (layout.tight ? 0 : 1));
        if (cached && h + 1 == spec.kv_heads) ++full;
      }
  }

  std::vector<std::int32_t> cached;
  for (std::int32_t l = 0; l < spec.num_layers(); ++l) {
    if (spec.layers[static_cast<std::size_t>(l)].kind != LayerKind::full) {
      cache_.emplace_back(std::monostate{});
      continue;
    }
    const std::int64_t batch = n + (layout.tight ? 0 : 2);
    const auto room = [&](std::int64_t dim) {
      const auto nan = [&](std::initializer_list<std::int64_t> shape) { return Array::full(shape, kNaN, Dtype::f32); };
      return layout.transposed ? nan({batch, capacity, spec.kv_heads, dim}).permute({0, 2, 1, 3})
                               : nan({batch, spec.kv_heads, capacity, dim});
    };
    const Array keys = room(spec.key_dim), values = room(spec.value_dim);
    for (std::int32_t i = 0; i < n; ++i) {
      const std::int32_t s = order_[static_cast<std::size_t>(i)], start = starts[static_cast<std::size_t>(i)],
                         place = places[static_cast<std::size_t>(i)];
      const oracle::ScorerInput& in = from.inputs_[static_cast<std::size_t>(s)][cached.size()];
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const oracle::ScorerHead& head = in.heads[static_cast<std::size_t>(h)];
        std::vector<float> k = head.keys, v = head.values;
        if (s == layout.poisoned) {
          Random dice(from.seed_ + static_cast<std::uint64_t>(h));
          for (int t = 0; t < head.T; ++t)
            if (t == 0 || dice.chance(0.2))
              k[static_cast<std::size_t>(t * in.D + dice.between(0, in.D - 1))] =
                  dice.one_of({kNaN, kInfinity, -kInfinity});
        }
        keys[place][h].narrow(0, start, head.T).copy_(Array(k.data(), Dtype::f32, {head.T, in.D}));
        values[place][h].narrow(0, start, head.T).copy_(Array(v.data(), Dtype::f32, {head.T, in.Dv}));
      }
    }
    cache_.emplace_back(DenseKv{keys.to(from.key_dtype_), values.to(from.value_dtype_)});
    cached.push_back(l);
  }
  std::vector<std::int32_t> due(static_cast<std::size_t>(n));
  std::iota(due.begin(), due.end(), 0);
  const CacheView view{
      .sequences = ids, .lengths = {lengths, spec.num_layers() * spec.kv_heads}, .places = places, .starts = starts};
  table_ = make_rows(spec, cache_, view, cached, due);

  for (Row& row : table_.rows) {
    const oracle::ScorerHead& head = input(row).heads[static_cast<std::size_t>(row.head)];
    row.positions = head.positions.data();
    row.tally = head.tally.empty() ? nullptr : head.tally.data();
    row.tally_length = static_cast<std::int32_t>(head.tally.size());
    row.given = head.given.data();
    row.given_length = static_cast<std::int32_t>(head.given.size());
    limits_.rows.push_back({head.budget, head.due, {head.sinks, head.recents}});
  }
  rings_.resize(table_.groups.size());
  for (std::size_t g = 0; g < table_.groups.size(); ++g) {
    RowGroup& group = table_.groups[g];
    const oracle::ScorerInput& in = input(table_.rows[static_cast<std::size_t>(group.first_row)]);
    group.next_position = in.P;
    group.prompt_end = in.prompt;
    group.seen = {in.P};
    group.prompt = {in.prompt};
    if (in.N() == 0) continue;
    Ring& ring = rings_[g];
    const auto size = static_cast<std::int64_t>(element_size(from.query_dtype_));
    const std::int64_t head_stride = (in.D + random.between(0, 1)) * size,
                       token_stride = in.Hq * head_stride + random.between(0, 3) * size;
    QueryView& ring_view = group.queries;
    ring_view.ring = in.N() + random.one_of({0, 0, 1, 9});
    ring_view.begin = random.between(0, ring_view.ring - 1);  // wraps around
    ring_view.count = in.N();
    ring.data.assign(static_cast<std::size_t>(ring_view.ring * token_stride), std::byte{0xFF});  // NaN in every dtype
    ring.positions.assign(static_cast<std::size_t>(ring_view.ring), -1);
    ring_view.data = ring.data.data();
    ring_view.positions = ring.positions.data();
    ring_view.dtype = from.query_dtype_;
    ring_view.token_stride = token_stride;
    ring_view.head_stride = head_stride;
    const std::vector<double>& given = from.basis_ == QueryBasis::pre_rope ? in.queries_pre : in.queries;
    for (std::int32_t i = 0; i < in.N(); ++i) {
      ring.positions[static_cast<std::size_t>(ring_view.index(i))] = in.query_positions[static_cast<std::size_t>(i)];
      for (std::int32_t h = 0; h < in.Hq; ++h)
        for (std::int32_t d = 0; d < in.D; ++d)
          put(ring.data.data() + ring_view.index(i) * token_stride + h * head_stride + d * size,
              static_cast<float>(
                  given[(static_cast<std::size_t>(h) * static_cast<std::size_t>(in.N()) + static_cast<std::size_t>(i)) *
                            static_cast<std::size_t>(in.D) +
                        static_cast<std::size_t>(d)]),
              from.query_dtype_);
    }
  }
}

Scores scores_of(const Scorer& scorer, const ScorerArrangement& arrangement) {
  const Evidence evidence = arrangement.evidence();
  WindowAttention seen;
  const WindowNeeds shared = scorer.shares();
  if (shared.usage || shared.newest)
    seen = window_attention(evidence, row_windows(evidence, arrangement.limits(), 1, false), shared);
  Scores scores = scorer.score(evidence, arrangement.limits(), seen);
  if (scorer.sharing() == Sharing::per_layer_per_head) return scores;
  const Needs needs = scorer.needs();
  const Flat flat;
  return host()
      .begin(evidence, arrangement.limits(), Demand{scorer.name(), needs, scorer, flat, scorer.sharing()})
      ->share(scores, scorer.sharing());
}

void expect_scores_agree(const Scorer& scorer, const ScorerOracle& oracle, int cases, Tolerance tolerance,
                         const ScorerCaseOptions& options) {
  const LoopThreads one(1);
  std::int64_t compared = 0;
  for (int seed = 0; seed < oracle::random_case_count(cases); ++seed) {
    const ScorerCase c(static_cast<std::uint64_t>(seed), options);
    const ScorerArrangement arrangement = c.arranged();
    const Scores scores = scores_of(scorer, arrangement);
    ASSERT_EQ(scores.data.numel(), arrangement.table().slots) << c.description();
    const float* g = scores.data.data<float>();
    for (std::int32_t s = 0; s < c.sequences(); ++s)
      for (std::int32_t l = 0; l < c.layers(); ++l) {
        const oracle::ScorerInput& in = c.input(s, l);
        if (std::none_of(in.heads.begin(), in.heads.end(), [](const oracle::ScorerHead& h) { return h.due; })) continue;
        const oracle::ScorerOutput want = oracle(in);
        for (const Row& row : arrangement.table().rows) {
          if (arrangement.sequence_of(row) != s || row.layer != in.layer) continue;
          const auto h = static_cast<std::size_t>(row.head);
          if (!in.heads[h].due) continue;
          ASSERT_EQ(want[h].size(), static_cast<std::size_t>(row.length)) << c.description();
          for (std::int32_t t = 0; t < row.length; ++t) {
            if (in.heads[h].guarded(t)) continue;
            const double expected = want[h][static_cast<std::size_t>(t)], got = static_cast<double>(g[row.first + t]);
            ++compared;
            if (std::isnan(expected) && std::isnan(got)) continue;
            ASSERT_NEAR(got, expected, tolerance.absolute + tolerance.relative * std::abs(expected))
                << "layer " << row.layer << ", sequence " << s << ", head " << h << ", slot " << t << " of "
                << row.length << "; " << c.description();
          }
        }
      }
  }
  EXPECT_GT(compared, 0) << "no slot was compared";
}

void expect_scorer_laws(const Scorer& scorer, int cases, const ScorerCaseOptions& options) {
  const LoopThreads one(1);
  std::int64_t compared = 0;
  for (int seed = 0; seed < oracle::random_case_count(cases); ++seed) {
    const ScorerCase c(static_cast<std::uint64_t>(seed) + 1000003, options);
    const ScorerArrangement arrangement = c.arranged();
    const Bits want = bits_of(scorer, arrangement);
    compared += static_cast<std::int64_t>(want.values.size());
    const Bits on_two_threads = [&] {
      const LoopThreads two(2);
      return bits_of(scorer, arrangement);
    }();

    std::vector<std::pair<const char*, ScorerCase::Layout>> layouts(3);
    layouts[0].first = "with transposed strides", layouts[0].second.transposed = true;
    layouts[1].first = "without padding", layouts[1].second.tight = true;
    layouts[2].first = "in reverse order", layouts[2].second.order.resize(static_cast<std::size_t>(c.sequences()));
    std::iota(layouts[2].second.order.rbegin(), layouts[2].second.order.rend(), 0);
    ASSERT_EQ(difference(on_two_threads, want), "") << "on two threads; " << c.description();
    for (const auto& [what, layout] : layouts) {
      const Bits got = bits_of(scorer, c.arranged(layout));
      ASSERT_EQ(difference(got, want), "") << what << "; " << c.description();
    }
    for (std::int32_t s = 0; s < c.sequences(); ++s) {
      ScorerCase::Layout alone, poisoned;
      alone.order = {s};
      poisoned.poisoned = s;
      Bits mine, others;
      for (std::size_t i = 0; i < want.values.size(); ++i) {
        Bits& part = want.keys[4 * i + 1] == s ? mine : others;
        part.keys.insert(part.keys.end(), want.keys.begin() + static_cast<std::ptrdiff_t>(4 * i),
                         want.keys.begin() + static_cast<std::ptrdiff_t>(4 * i + 4));
        part.values.push_back(want.values[i]);
      }
      const Bits got_alone = bits_of(scorer, c.arranged(alone)), got_others = bits_of(scorer, c.arranged(poisoned), s);
      ASSERT_EQ(difference(got_alone, mine), "") << "alone; " << c.description();
      ASSERT_EQ(difference(got_others, others), "") << "beside NaN and infinity; " << c.description();
    }
  }
  EXPECT_GT(compared, 0) << "no slot was compared";
}

void expect_equal_slots_score_equal_bits(const Scorer& scorer, int cases, const ScorerCaseOptions& options) {
  const LoopThreads one(1);
  std::int64_t compared = 0;
  for (int seed = 0; seed < oracle::random_case_count(cases); ++seed) {
    const ScorerCase c(static_cast<std::uint64_t>(seed) + 2000003, options);
    const ScorerArrangement arrangement = c.arranged();
    const Scores scores = scores_of(scorer, arrangement);
    const float* g = scores.data.data<float>();
    each_counted_slot(arrangement, [&](const Row& row, const oracle::ScorerHead& head, std::int32_t t) {
      if (scorer.needs().queries > 0 && arrangement.input(row).N() == 0) return;  // ranks by age then
      const auto dim = static_cast<std::size_t>(c.spec().key_dim),
                 value_dim = static_cast<std::size_t>(c.spec().value_dim);
      for (std::int32_t e = 0; e < t; ++e) {
        if (head.guarded(e) ||
            std::memcmp(head.key(e, c.spec().key_dim), head.key(t, c.spec().key_dim), dim * sizeof(float)) != 0 ||
            std::memcmp(head.value(e, c.spec().value_dim), head.value(t, c.spec().value_dim),
                        value_dim * sizeof(float)) != 0)
          continue;
        ++compared;
        EXPECT_EQ(bits(g[row.first + e]), bits(g[row.first + t]))
            << "slots " << e << " and " << t << " of layer " << row.layer << ", head " << row.head << "; "
            << c.description();
        return;
      }
    });
  }
  EXPECT_GT(compared, 0) << "no equal slots were found";
}

void for_every_instruction_set(const std::function<void()>& body) {
  const std::int64_t all = hwy::SupportedTargets();
  for (std::int64_t left = all; left != 0; left &= left - 1) {
    const std::int64_t target = left & -left;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace kvkeep::testing
