// SPDX-License-Identifier: Apache-2.0
#include "evaluation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>

#include "kvlab/tasks.h"

namespace train {
namespace {

using kvkeep::lm::TaskSample;
using torch::Tensor;

constexpr int32_t kSinks = 4;
constexpr int32_t kNewest = 32;  // beside the needed positions
constexpr int32_t kBatch = 8;

enum class Cache { kFull, kNewestQuarter, kNeeded };

/// bool [1, T, T]: the prompt sees itself whole, the trace sees what the cache still holds.
Tensor visible_part(const TaskSample& sample, Cache cache) {
  const auto length = static_cast<int32_t>(sample.ids.size());
  Tensor visible = torch::zeros({1, length, length}, torch::kBool);
  auto cell = visible.accessor<bool, 3>();
  const int32_t window = cache == Cache::kNeeded ? kNewest : length / 4;
  for (int32_t query = 0; query < length; ++query) {
    const bool whole = query < sample.prompt_length;
    for (int32_t slot = 0; slot <= query; ++slot)
      cell[0][query][slot] = whole || slot < kSinks || query - slot < window;
    if (whole || cache != Cache::kNeeded) continue;
    for (size_t i = 0; i < sample.needed.size(); ++i)
      if (sample.needed[i] <= query && query < sample.needed_until[i]) cell[0][query][sample.needed[i]] = true;
  }
  return visible;
}

Tensor ids_of(const std::vector<TaskSample>& samples) {
  std::vector<Tensor> rows;
  for (const TaskSample& sample : samples) rows.push_back(torch::tensor(sample.ids, torch::kInt64));
  return torch::stack(rows);
}

struct Count {
  int64_t right = 0, asked = 0;
};

void count_look_ups(const Tensor& guess, const std::vector<TaskSample>& samples, Count& count) {
  const auto guessed = guess.accessor<int64_t, 2>();
  for (size_t b = 0; b < samples.size(); ++b) {
    for (size_t i = 1; i < samples[b].ids.size(); ++i) {
      if (samples[b].target[i] != kvkeep::lm::kLookUp) continue;
      count.asked += 1;
      count.right += guessed[static_cast<int64_t>(b)][static_cast<int64_t>(i) - 1] == samples[b].ids[i];
    }
  }
}

std::vector<TaskSample> fresh_samples(std::string_view task, int32_t length, uint64_t first_seed, int32_t n) {
  std::vector<TaskSample> samples;
  for (int32_t i = 0; i < n; ++i)
    samples.push_back(kvkeep::lm::make_task(task, first_seed + static_cast<uint64_t>(i), {.length = length}));
  return samples;
}

Count measure(const Llama& model, const std::vector<TaskSample>& all, Cache cache) {
  Count count;
  for (size_t begin = 0; begin < all.size(); begin += kBatch) {
    const std::vector<TaskSample> some(all.begin() + begin, all.begin() + std::min(all.size(), begin + kBatch));
    Tensor visible;
    if (cache != Cache::kFull) {
      std::vector<Tensor> masks;
      for (const TaskSample& sample : some) masks.push_back(visible_part(sample, cache));
      visible = torch::stack(masks);
    }
    count_look_ups(model.logits(model.hidden(ids_of(some), visible)).argmax(-1), some, count);
  }
  return count;
}

std::string with_interval(const Count& count) {
  const double n = static_cast<double>(count.asked), p = static_cast<double>(count.right) / n;
  constexpr double z = 1.96;
  const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double reach = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  char text[64];
  std::snprintf(text, sizeof text, "%.4f (%.4f to %.4f)", p, middle - reach, middle + reach);
  return text;
}

/// The role of a position in one look-up.
enum Part {
  kStart,
  kSectionPart,
  kFillerPart,
  kAfterFact,
  kAskedKey,
  kAskedValue,
  kAfterAsked,
  kOtherKey,
  kOtherValue,
  kTrace,
  kParts
};
constexpr std::array<const char*, kParts> kPartNames{
    "BOS",       "SEC",         "filler",     "word after another fact", "asked key", "asked value", "word after",
    "other key", "other value", "trace, rest"};

std::vector<Part> parts_for(const TaskSample& sample, int32_t look_up) {
  const auto is_entity = [&](int32_t i) { return i >= 0 && sample.ids[i] >= kvkeep::lm::kFirstEntity; };
  const int32_t key = sample.ids[look_up - 1];
  std::vector<Part> parts(look_up);
  for (int32_t i = 0; i < look_up; ++i) {
    const int32_t id = sample.ids[i];
    const bool prompt = i < sample.prompt_length;
    if (is_entity(i) && is_entity(i - 1)) {
      parts[i] = sample.ids[i - 1] == key ? kAskedValue : prompt ? kOtherValue : kTrace;
    } else if (is_entity(i) && is_entity(i + 1) && i + 1 < look_up) {
      parts[i] = id == key ? kAskedKey : prompt ? kOtherKey : kTrace;
    } else if (is_entity(i - 1) && is_entity(i - 2) && sample.ids[i - 2] == key) {
      parts[i] = kAfterAsked;
    } else if (!prompt) {
      parts[i] = kTrace;
    } else if (is_entity(i - 1)) {
      parts[i] = kAfterFact;
    } else {
      parts[i] = id == kvkeep::lm::kBos ? kStart : id < kvkeep::lm::kFirstFiller ? kSectionPart : kFillerPart;
    }
  }
  return parts;
}

}  // namespace

void print_accuracy(const Llama& model, const EvaluationOptions& options) {
  torch::NoGradGuard no_grad;
  std::printf("| task | length | look-ups | full | newest quarter | needed + newest %d |\n|---|---|---|---|---|---|\n",
              kNewest);
  for (int32_t length : options.lengths) {
    for (const auto& task : kvkeep::lm::tasks()) {
      const auto samples = fresh_samples(task.name, length, options.first_seed, options.samples);
      const Count full = measure(model, samples, Cache::kFull);
      const Count newest = measure(model, samples, Cache::kNewestQuarter);
      const Count needed = measure(model, samples, Cache::kNeeded);
      std::printf("| %s | %d | %lld | %s | %s | %s |\n", std::string(task.name).c_str(), length,
                  static_cast<long long>(full.asked), with_interval(full).c_str(), with_interval(newest).c_str(),
                  with_interval(needed).c_str());
      std::fflush(stdout);
    }
  }
}

void print_attention(const Llama& model, int32_t length, uint64_t first_seed) {
  torch::NoGradGuard no_grad;
  constexpr int32_t kSamples = 20;
  std::printf("\n| task | layer.head |");
  for (const char* name : kPartNames) std::printf(" %s |", name);
  std::printf("\n|---|---|");
  for (int part = 0; part < kParts; ++part) std::printf("---|");
  std::printf("\n");
  for (const auto& task : kvkeep::lm::tasks()) {
    std::map<std::pair<int64_t, int64_t>, std::array<double, kParts>> shares;
    int64_t look_ups = 0;
    for (const TaskSample& sample : fresh_samples(task.name, length, first_seed, kSamples)) {
      std::map<int32_t, std::vector<Part>> parts;
      for (int32_t i = 1; i < length; ++i)
        if (sample.target[i] == kvkeep::lm::kLookUp) parts[i] = parts_for(sample, i);
      look_ups += static_cast<int64_t>(parts.size());
      model.hidden(ids_of({sample}), {}, [&](int64_t layer, const Tensor& attention) {
        const auto share = attention.accessor<float, 4>();
        for (int64_t head = 0; head < attention.size(1); ++head)
          for (const auto& [i, part_of] : parts)
            for (int32_t slot = 0; slot < i; ++slot)
              shares[{layer, head}][part_of[slot]] += share[0][head][i - 1][slot];
      });
    }
    for (const auto& [where, sums] : shares) {
      std::printf("| %s | %lld.%lld |", std::string(task.name).c_str(), static_cast<long long>(where.first),
                  static_cast<long long>(where.second));
      for (double sum : sums) std::printf(" %.2f |", sum / static_cast<double>(look_ups));
      std::printf("\n");
    }
  }
}

}  // namespace train
