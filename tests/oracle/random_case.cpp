// SPDX-License-Identifier: Apache-2.0
#include "random_case.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

namespace oracle {

uint64_t Random::bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double Random::unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

int Random::between(int first, int last) {
  return first + static_cast<int>(bits() % static_cast<uint64_t>(last - first + 1));
}

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - unit()));
  return radius * std::cos(6.283185307179586 * unit());
}

namespace {

int random_length(Random& random, int largest) {
  int T = 0;
  switch (random.between(0, 5)) {
    case 0:
      T = random.between(1, 5);
      break;
    case 1:
      T = 1 << random.between(1, 8);
      break;
    case 2:
      T = (1 << random.between(1, 8)) + 1;
      break;
    case 3:
      T = random.between(1, 300);
      break;
    default:
      T = random.between(4, 80);
  }
  return std::min(T, largest);
}

// Options

void choose_allocator(Random& random, Options& o, int T) {
  const bool official = o.variant == "official";
  o.window = random.one_of({1, 2, 3, 5, 8, 32, T, T + 5});
  o.pool = random.one_of({1, 3, 5, 5, 7});
  o.segment_mass = random.one_of({0.02, 0.05, 0.06, 0.1, 0.1, 0.2, 0.3, 0.7, 1.0});
  o.min_segment = random.one_of({1, 2, 3, 8, 16, 32});
  o.max_segment = o.min_segment * 2 + random.one_of({0, 1, 7, 64, 1024});
  if (official && random.chance(0.3)) o.max_segment = o.min_segment;
  o.min_quota = random.one_of({0, 1, 8});
  o.credit_decay = random.one_of({0.0, 0.5, 0.8, 0.9});
  o.credit_mix = random.one_of({0.0, 0.3, 0.7, 0.9, 1.0});
  o.credit = random.chance(0.8);
  o.suffix_fill = random.one_of({"max_head", "max_head", "max_global", "causal_mean", "exclude"});
  o.segments = random.one_of({"mass", "mass", "mass", "fixed:1", "fixed:7", "fixed:32", "none"});
  o.quotas = random.one_of({"mass", "mass", "mass", "equal", "length", "raw_mass"});
  if (!official) o.coverage = random.one_of({1.0, 1.0, 1.0, 0.75, 0.5, 0.3, 0.0, -1.0, -1.0});
  o.coverage_auto = o.coverage < 0;
  if (!official) o.protected_mass = random.chance(0.6);
}

Options random_options(Random& random, int T) {
  Options o;
  o.policy =
      random.one_of({"ams-tova", "ams-tova", "ams-tova", "ams-tova", "ams-tova", "ams-tova", "tova", "streaming"});
  o.variant = random.one_of({"strict", "strict", "official"});
  o.budget = random.chance(0.9) ? random.between(1, T) : random.between(1, T + 3);
  o.sink = std::min(random.one_of({0, 1, 4}), o.budget - 1);
  o.recent = random.one_of({0, 1, 2, -1});
  o.tova_heads_all = random.chance(0.8);
  if (o.policy == "ams-tova") choose_allocator(random, o, T);
  return o;
}

// Tensors

enum class Keys { normal, heavy_tailed, one_loud, few_kinds, constant, one_hot, zero };

constexpr const char* kKeysNames[] = {"normal", "heavy-tailed", "one-loud", "few-kinds", "constant", "one-hot", "zero"};

std::vector<float> random_key(Random& random, Keys kind, int slot, int D) {
  std::vector<float> key(D, 0.0f);
  switch (kind) {
    case Keys::zero:
      break;
    case Keys::constant:
      std::fill(key.begin(), key.end(), 0.5f);
      break;
    case Keys::one_hot:
      key[slot % D] = 2.0f;
      break;
    case Keys::few_kinds: {
      Random same(random.between(0, 3));
      for (float& x : key) x = static_cast<float>(same.normal());
      break;
    }
    default: {
      const double loud = kind == Keys::one_loud && slot == 2 ? 8 : 1;
      const double size = kind == Keys::heavy_tailed ? std::exp(0.8 * random.normal()) : loud;
      for (float& x : key) x = static_cast<float>(size * random.normal());
    }
  }
  return key;
}

void append_keys(Random& random, Keys kind, Sequence& s, std::vector<float>& keys, int first, int last) {
  for (int t = first; t < last; ++t) {
    const std::vector<float> key = random_key(random, kind, t, s.D);
    keys.insert(keys.end(), key.begin(), key.end());
  }
}

/// Positions as after an eviction: a few sinks, a thinned middle, the newest unbroken, the last at next - 1.
std::vector<int> random_positions(Random& random, int T, int next) {
  std::vector<int> positions(T);
  const int sinks = std::min(T, random.between(0, 4));
  const int newest = std::min(T - sinks, random.between(1, 40));
  std::vector<int> middle;
  for (int p = sinks; p < next - newest; ++p) middle.push_back(p);
  while (static_cast<int>(middle.size()) > T - sinks - newest)
    middle.erase(middle.begin() + random.between(0, static_cast<int>(middle.size()) - 1));
  for (int t = 0; t < sinks; ++t) positions[t] = t;
  std::copy(middle.begin(), middle.end(), positions.begin() + sinks);
  for (int t = 0; t < newest; ++t) positions[T - newest + t] = next - newest + t;
  return positions;
}

void append_queries(Random& random, Sequence& s, int count, int next) {
  const double size = random.one_of({0.3, 1.0, 1.0, 3.0});
  for (int i = 0; i < count; ++i) s.query_positions.push_back(next - count + i);
  for (int i = 0; i < s.Hq * count * s.D; ++i) s.queries.push_back(static_cast<float>(size * random.normal()));
}

int random_query_count(Random& random, const Options& o, int next) {
  const int count = random.one_of({0, 1, 2, o.window - 1, o.window, o.window + 1, o.window + 1, o.window + 9});
  return std::clamp(count, 0, std::min(next, 150));
}

/// Credit as an EMA leaves it: most of it zero-sum noise on a decaying mass, never above 1 in sum.
void add_credit(Random& random, Sequence& s) {
  const int seen = random.chance(0.3) ? s.T : random.between(0, s.T);
  for (int h = 0; h < s.Hkv; ++h) {
    std::vector<double> credit(seen);
    double sum = 1e-9;
    for (double& c : credit) sum += c = random.chance(0.1) ? 0.0 : std::exp(random.normal());
    for (double& c : credit) c = static_cast<float>(0.9 * c / sum);
    s.credit.push_back(credit);
  }
}

Sequence random_sequence(Random& random, const Options& o, int T, Keys kind) {
  Sequence s;
  s.T = T;
  s.Hkv = random.one_of({1, 1, 2, 3});
  s.Hq = s.Hkv * random.one_of({1, 2, 3, 4, 7, 8});
  s.D = random.one_of({2, 4, 8, 16});
  s.scale = random.chance(0.8) ? 1 / std::sqrt(static_cast<double>(s.D)) : 0.25;
  const int evicted = random.chance(0.5) ? 0 : random.between(1, 2 * T);
  const int next = T + evicted;
  for (int h = 0; h < s.Hkv; ++h) {
    append_keys(random, kind, s, s.keys, 0, T);
    const std::vector<int> positions = random_positions(random, T, next);
    s.positions.insert(s.positions.end(), positions.begin(), positions.end());
  }
  Random sinker(static_cast<uint64_t>(next) * 64 + static_cast<uint64_t>(s.Hq));
  if (sinker.chance(0.25)) s.cap = sinker.one_of({2.0, 30.0});
  if (sinker.chance(0.3))
    for (int h = 0; h < s.Hq; ++h)
      s.sinks.push_back(sinker.chance(0.2) ? -std::numeric_limits<double>::infinity()
                                           : static_cast<float>(1 + 2 * sinker.normal()));
  append_queries(random, s, random_query_count(random, o, next), next);
  if (o.policy.rfind("ams-", 0) == 0 && o.credit && random.chance(0.5)) add_credit(random, s);
  return s;
}

std::string described(uint64_t seed, const Options& o, const Sequence& s, Keys kind) {
  std::ostringstream out;
  out << "seed " << seed << ": " << o.policy << ' ' << o.variant << ", " << s.T << " -> " << o.budget << ", sink "
      << o.sink << ", recent " << o.recent << ", heads " << s.Hq << '/' << s.Hkv << ", D " << s.D << ", "
      << s.queries_seen() << " queries, " << kKeysNames[static_cast<int>(kind)] << " keys, last position "
      << s.positions.back();
  if (o.policy != "ams-tova") return out.str();
  out << ", window " << o.window << ", pool " << o.pool << ", segments " << o.segments << " of " << o.segment_mass
      << " in [" << o.min_segment << ", " << o.max_segment << "], quotas " << o.quotas << ", min_quota " << o.min_quota
      << ", fill " << o.suffix_fill << ", coverage " << (o.coverage_auto ? "auto" : std::to_string(o.coverage))
      << (o.protected_mass ? "" : ", without protected mass");
  if (o.credit)
    out << ", credit " << o.credit_decay << '/' << o.credit_mix << " of "
        << (s.credit.empty() ? 0 : s.credit[0].size());
  return out.str();
}

RandomCase case_of_length(Random& random, uint64_t seed, const Options& options, int T) {
  const Keys kind =
      random.one_of({Keys::normal, Keys::normal, Keys::normal, Keys::heavy_tailed, Keys::heavy_tailed,
                     Keys::heavy_tailed, Keys::one_loud, Keys::few_kinds, Keys::constant, Keys::one_hot, Keys::zero});
  RandomCase out{options, random_sequence(random, options, T, kind), ""};
  out.description = described(seed, options, out.sequence, kind);
  return out;
}

}  // namespace

RandomCase random_case(uint64_t seed) {
  Random random(seed);
  const int T = random_length(random, 300);
  return case_of_length(random, seed, random_options(random, T), T);
}

RandomCase random_case(uint64_t seed, const Options& options, int largest_T) {
  Random random(seed);
  const int T = random_length(random, largest_T);
  return case_of_length(random, seed, options, T);
}

int random_case_count(int normally) {
  const char* asked = std::getenv("KVKEEP_RANDOM_CASES");
#ifdef KVKEEP_SANITIZED
  normally = (normally + 2) / 3;  // each takes several times as long here; the optimized build runs them all
#endif
  return asked ? std::atoi(asked) : normally;
}

Sequence continued(const Sequence& before, const std::vector<Row>& rows, int new_tokens, uint64_t seed) {
  Random random(seed);
  const int kept = static_cast<int>(rows[0].slots.size());
  const int next = before.positions.back() + 1;
  Sequence s = before;
  s.T = kept + new_tokens;
  s.keys.clear();
  s.positions.clear();
  s.credit.clear();
  for (int h = 0; h < s.Hkv; ++h) {
    for (int slot : rows[h].slots) {
      const size_t row = static_cast<size_t>(h) * before.T + slot;
      s.positions.push_back(before.positions[row]);
      s.keys.insert(s.keys.end(), before.keys.begin() + row * s.D, before.keys.begin() + (row + 1) * s.D);
    }
    for (int i = 0; i < new_tokens; ++i) s.positions.push_back(next + i);
    append_keys(random, Keys::normal, s, s.keys, kept, s.T);
    s.credit.push_back(rows[h].credit_kept);
  }
  const int queries = std::min(std::max(before.queries_seen(), new_tokens), next + new_tokens);
  s.queries.clear();
  s.query_positions.clear();
  append_queries(random, s, queries, next + new_tokens);
  return s;
}

}  // namespace oracle
