// SPDX-License-Identifier: Apache-2.0
// Whole events: Keeper::step over all layers and sequences of a bf16 cache, beside what LibTorch's operations need for
// less work in the same run; and what a step costs without an event. Queries come after RoPE, which is how an event
// reads them fastest, and in cases of their own before RoPE, or with the log-sum-exps of the engine's attention.
//
// `eager_us`: GPU time between two CUDA events around keeper.step(); `graph_us`: of the same event replayed from a CUDA
// graph; `host_us`: what the call takes on the host until it returns; `launches`: kernels in the graph; medians.
// `torch_us`: topk, sort, and gather of K and V, layer by layer, given finished scores. `bytes`: kept rows read and
// written, and the keys once if the policy reads them.

#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numeric>

#include "kvkeep/kvkeep.h"
#include "kvkeep/torch.h"
#include "timing.h"
#include "torch_machine.h"
#include "tuning.cuh"

namespace kvkeep::cuda {
namespace {

/// What an engine shows of its queries.
enum class Shown : std::uint8_t { post_rope, pre_rope, with_sums };

/// An engine that has nothing but a cache: its keys and values are noise, its queries one tensor that every layer
/// shows.
class Engine {
 public:
  Engine(const Shape& shape, const std::string& policy, Size size, Shown shown, at::Device device,
         std::shared_ptr<Machine> accelerator)
      : shape_(shape), size_(size), shown_(shown) {
    const auto there = at::TensorOptions().dtype(at::kBFloat16).device(device);
    ModelSpec spec;
    spec.query_heads = shape.query_heads(), spec.kv_heads = shape.kv_heads, spec.key_dim = spec.value_dim = shape.dim;
    spec.layers.resize(static_cast<std::size_t>(shape.layers));
    for (std::int32_t f = 0; f < shape.dim / 2; ++f) spec.rope.inv_freq.push_back(std::pow(1e6, -2.0 * f / shape.dim));
    keeper = std::make_unique<Keeper>(
        spec, make_policy(text(policy, ",budget=", size.budget, ",interval=", size.length - size.budget)),
        Provided{.accelerator = std::move(accelerator)});
    const std::int64_t pages = size.page == 0 ? 0 : (size.length + size.page - 1) / size.page;
    const auto side = [&] {
      return size.page == 0 ? at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there)
                            : at::randn({pages * size.batch, size.page, shape.kv_heads, shape.dim}, there);
    };
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      const at::Tensor keys = side(), values = side();
      if (size.page == 0)
        layers.emplace_back(DenseKv{keys, values});
      else
        layers.emplace_back(PagedKv{keys, values});
    }
    keeper->bind(layers);
    const std::int64_t tokens = std::int64_t{size.batch} * (size.length - size.budget);
    queries = at::randn({tokens, shape.query_heads(), shape.dim}, there);
    if (shown == Shown::with_sums) sums_ = at::zeros({tokens, shape.query_heads()}, there.dtype(at::kFloat));
    if (size.page != 0) table_ = at::empty({size.batch, pages}, at::TensorOptions().dtype(at::kInt));
    lengths_.assign(static_cast<std::size_t>(size.batch), size.budget);
    for (std::int32_t s = 0; s < size.batch; ++s) {
      ids_.push_back(s);
      keeper->join(s, size.budget);
    }
  }

  /// Shows `tokens` more of every sequence to all layers.
  void observe(std::int32_t tokens) {
    std::vector<std::int32_t> indptr{0};
    for (std::int32_t s = 0; s < size_.batch; ++s) indptr.push_back(indptr.back() + tokens);
    const at::Tensor shown = queries.narrow(0, 0, indptr.back());
    for (std::int32_t l = 0; l < shape_.layers; ++l) {
      Observation seen{.layer = l, .sequences = ids_, .indptr = indptr, .queries = shown};
      if (shown_ != Shown::pre_rope) seen.basis = QueryBasis::post_rope;
      if (sums_.defined()) seen.log_sum_exp = log_sum_exps(l, tokens);
      keeper->observe(seen);
    }
    for (std::int32_t& length : lengths_) length += tokens;
  }
  /// Adds tokens up to the next event, which is then due.
  void fill() {
    lengths_.assign(lengths_.size(), size_.budget);
    observe(size_.length - size_.budget);
    if (size_.page != 0)
      std::iota(table_.data_ptr<std::int32_t>(), table_.data_ptr<std::int32_t>() + table_.numel(), 0);
  }
  Report cut() { return keeper->step({.sequences = ids_, .lengths = {lengths_}, .block_table = table_}); }

  /// The slots of a row of a dense layer, [length, D], on the CPU.
  [[nodiscard]] at::Tensor row(std::int32_t layer, std::int32_t sequence, std::int32_t head, bool values) const {
    const auto& dense = std::get<DenseKv>(layers[static_cast<std::size_t>(layer)]);
    return torch_tensor(values ? dense.values : dense.keys)
        .select(0, sequence)
        .select(0, head)
        .to(c10::kCPU, false, true);
  }
  /// Takes the keys, values and queries of another engine.
  void become(const Engine& other) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      torch_tensor(std::get<DenseKv>(layers[l]).keys).copy_(std::get<DenseKv>(other.layers[l]).keys);
      torch_tensor(std::get<DenseKv>(layers[l]).values).copy_(std::get<DenseKv>(other.layers[l]).values);
    }
    queries.copy_(other.queries);
  }

  std::unique_ptr<Keeper> keeper;
  std::vector<LayerKv> layers;
  at::Tensor queries;

 private:
  /// Of the newest queries over the slots that they see, as attention would give them; zeros for those before.
  at::Tensor log_sum_exps(std::int32_t layer, std::int32_t tokens) {
    const std::int64_t window = std::min(tokens, 32), heads = shape_.kv_heads, group = shape_.group, dim = shape_.dim;
    const at::Tensor keys = torch_tensor(std::get<DenseKv>(layers[static_cast<std::size_t>(layer)]).keys);
    const at::Tensor newest = queries.narrow(0, 0, std::int64_t{size_.batch} * tokens)
                                  .view({size_.batch, tokens, heads, group, dim})
                                  .narrow(1, tokens - window, window)
                                  .permute({0, 2, 3, 1, 4})
                                  .reshape({size_.batch, heads, group * window, dim});
    const std::int64_t slots = lengths_[0] + tokens;
    at::Tensor logits = at::matmul(newest.to(at::kFloat), keys.narrow(2, 0, slots).to(at::kFloat).transpose(2, 3))
                            .mul_(1.0 / std::sqrt(static_cast<double>(dim)))
                            .view({size_.batch, heads, group, window, slots});
    // Query i of the window does not see the slots of those after it.
    logits.narrow(4, slots - window, window)
        .masked_fill_(at::ones({window, window}, at::TensorOptions().dtype(at::kBool).device(logits.device())).triu(1),
                      -HUGE_VAL);
    at::Tensor sums = sums_.narrow(0, 0, std::int64_t{size_.batch} * tokens);
    sums.view({size_.batch, tokens, heads * group})
        .narrow(1, tokens - window, window)
        .copy_(at::logsumexp(logits, 4).permute({0, 3, 1, 2}).reshape({size_.batch, window, heads * group}));
    return sums;
  }

  Shape shape_;
  Size size_;
  Shown shown_;
  at::Tensor table_, sums_;
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> lengths_;
};

std::vector<std::int32_t> kept_of(const Engine& engine, SequenceId id, std::int32_t layer, std::int32_t head) {
  const auto kept = engine.keeper->positions(id, layer, head);
  return {kept.begin(), kept.end()};
}

/// Checks the first event of a dense cache: it keeps what the CPU keeps (if that takes less than a minute), and each
/// kept slot's bytes are in place.
void check_first_event(Result& result, Engine& engine, const Shape& shape, const std::string& policy, Size size,
                       Shown shown) {
  const std::int32_t layer = shape.layers - 1, sequence = size.batch - 1, head = shape.kv_heads - 1;
  std::unique_ptr<Engine> cpu;
  if (std::int64_t{size.batch} * size.length <= 1536) {
    cpu = std::make_unique<Engine>(shape, policy, size, shown, c10::kCPU, nullptr);
    cpu->become(engine);
    cpu->fill();
  }
  const at::Tensor keys = engine.row(layer, sequence, head, false), values = engine.row(layer, sequence, head, true);
  engine.fill();
  static_cast<void>(engine.cut());
  const std::vector<std::int32_t> kept = kept_of(engine, sequence, layer, head);
  const at::Tensor slots = at::empty({static_cast<std::int64_t>(kept.size())}, at::TensorOptions().dtype(at::kInt));
  std::copy(kept.begin(), kept.end(), slots.data_ptr<std::int32_t>());
  const auto moved = [&](const at::Tensor& before, bool of_values) {
    return before.index_select(0, slots).equal(
        engine.row(layer, sequence, head, of_values).narrow(0, 0, slots.numel()));
  };
  if (!moved(keys, false) || !moved(values, true))
    result.fail("a kept slot does not hold the bytes that were at its position");
  if (!cpu) return;
  static_cast<void>(cpu->cut());
  std::int64_t others = 0, all = 0;
  for (std::int32_t s = 0; s < size.batch; ++s)
    for (std::int32_t l = 0; l < shape.layers; ++l)
      for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
        const std::vector<std::int32_t> here = kept_of(*cpu, s, l, h), there = kept_of(engine, s, l, h);
        std::vector<std::int32_t> only;
        std::set_difference(here.begin(), here.end(), there.begin(), there.end(), std::back_inserter(only));
        others += static_cast<std::int64_t>(only.size());
        all += static_cast<std::int64_t>(here.size());
      }
  result.set("unlike_cpu", static_cast<double>(others));
  // Near ties: a GPU's exponentials are off by an ulp or two, the model's are not.
  if (others > (kModel ? 0 : all / 1000))
    result.fail(text(others, " of ", all, " kept slots are not those that the CPU keeps"));
}

/// The time that LibTorch's operations take to do less: no columns, no segments, into new tensors.
double torch_milliseconds(const Shape& shape, Size size, const TorchStream& on) {
  const auto there = at::TensorOptions().device(on.device());
  std::vector<at::Tensor> keys, values, scores;
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    keys.push_back(at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there.dtype(at::kBFloat16)));
    values.push_back(at::randn({size.batch, shape.kv_heads, size.length, shape.dim}, there.dtype(at::kBFloat16)));
    scores.push_back(at::randn({size.batch, shape.kv_heads, size.length}, there.dtype(at::kFloat)));
  }
  std::vector<double> ms;
  at::Tensor some;
  for (int i = 0; i < 5; ++i)
    ms.push_back(milliseconds_there(
        [&] {
          for (std::size_t l = 0; l < keys.size(); ++l) {
            const at::Tensor best = std::get<1>(at::topk(scores[l], size.budget)), slots = std::get<0>(at::sort(best));
            const at::Tensor index = slots.unsqueeze(3).expand({size.batch, shape.kv_heads, size.budget, shape.dim});
            some = at::gather(keys[l], 2, index);
            some = at::gather(values[l], 2, index);
          }
        },
        on.native()));
  return median(ms);
}

void event(Result& result, const Shape& shape, const std::string& policy, Size size, Shown shown) {
  const TorchStream on;
  Engine engine(shape, policy, size, shown, on.device(), on.accelerator());
  if (size.page == 0) check_first_event(result, engine, shape, policy, size, shown);
  if (options().once) return;
  for (int i = 0; i < 2; ++i) {
    engine.fill();
    const Report report = engine.cut();
    if (report.cuts.size() != static_cast<std::size_t>(size.batch) || report.cuts[0].length_after != size.budget)
      return result.fail("the event did not cut to the budget");
  }
  std::vector<double> ms, host;
  const auto timed = [&] {
    engine.fill();
    synchronize(on.native());
    ms.push_back(milliseconds_there(
        [&] { host.push_back(milliseconds([&] { static_cast<void>(engine.cut()); }) * 1e3); }, on.native()));
  };
  timed();
  for (int n = kModel ? 1 : repetitions(2 * ms[0]); n > 1; --n) timed();
  const double rows = static_cast<double>(shape.layers) * shape.kv_heads * size.batch, width = 2.0 * shape.dim;
  const double passes = engine.keeper->policy().needs().keys ? 1 : 0;
  result.set("bytes", rows * size.budget * 2 * width * 2 + passes * rows * size.length * width);
  result.set("eager_us", median(ms) * 1e3);
  result.set("host_us", median(host));
  engine.fill();
  measure_graph(result, [&] { static_cast<void>(engine.cut()); }, on.native());
  if (shown == Shown::post_rope) result.set("torch_us", torch_milliseconds(shape, size, on) * 1e3);
}

/// What an engine pays in every step: `eager_us` and `host_us` of showing one token's queries to all layers, `idle_us`
/// of the step itself on the host.
void step_without_event(Result& result, const Shape& shape, Size size) {
  const TorchStream on;
  Engine engine(shape, "ams-tova", size, Shown::post_rope, on.device(), on.accelerator());
  engine.observe(1);
  static_cast<void>(engine.cut());
  std::vector<double> ms, host, idle;
  for (int i = 0; i < (options().toy || options().once ? 3 : 21); ++i) {
    synchronize(on.native());
    ms.push_back(
        milliseconds_there([&] { host.push_back(milliseconds([&] { engine.observe(1); }) * 1e3); }, on.native()));
    Report report;
    idle.push_back(milliseconds([&] { report = engine.cut(); }) * 1e3);
    if (!report.cuts.empty()) return result.fail("an event was due");
  }
  if (engine.keeper->logical_length(0) != size.budget + static_cast<std::int32_t>(ms.size()) + 1)
    result.fail("a token was lost");
  result.set("eager_us", median(ms) * 1e3);
  result.set("host_us", median(host));
  result.set("idle_us", median(idle));
}

/// No kernel begins before the one in front of it has ended, while it lives.
struct OneAfterTheOther {
  OneAfterTheOther() { tuning::kernels_overlap = false; }
  ~OneAfterTheOther() { tuning::kernels_overlap = true; }
};

}  // namespace

void add_events() {
  const std::vector<Size> toy{{2, 96, 64}, {2, 96, 64, 16}},
      real{{1, 1536, 1024}, {32, 1536, 1024}, {1, 1024, 512}, {32, 1536, 1024, 16}, {1, 32768, 2048}};
  for (const Shape& shape : shapes()) {
    for (const Size& size : options().toy ? toy : real)
      for (const std::string policy : {"ams-tova", "tova", "ams-keydiff", "snapkv", "streaming"}) {
        const bool is_first = size.length == real[0].length && size.page == 0;
        if (policy != "ams-tova" && !is_first && !options().toy) continue;
        const std::string extra = options().toy ? ",window=8" : "";
        const bool has_window = policy == "ams-tova" || policy == "ams-keydiff" || policy == "snapkv";
        const std::string name = text("Event/", policy, "/", shape.name, "/batch:", size.batch, "/", size.length, "->",
                                      size.budget, size.page == 0 ? "/dense" : "/pages:16");
        const auto add_shown = [&](const char* suffix, Shown shown) {
          add(name + suffix,
              [=](Result& result) { event(result, shape, has_window ? policy + extra : policy, size, shown); });
        };
        add_shown("", Shown::post_rope);
        if (policy != "ams-tova" || size.page != 0 || (!is_first && !options().toy)) continue;
        add_shown("/pre-rope", Shown::pre_rope);
        add_shown("/log-sum-exps", Shown::with_sums);
        add(name + "/no-overlap", [=](Result& result) {
          const OneAfterTheOther kernels;
          event(result, shape, policy + extra, size, Shown::post_rope);
        });
      }
    for (const Size& size :
         options().toy ? std::vector<Size>{{2, 96, 64}} : std::vector<Size>{{1, 1536, 1024}, {32, 1536, 1024}})
      add(text("StepWithoutEvent/", shape.name, "/batch:", size.batch),
          [=](Result& result) { step_without_event(result, shape, size); });
  }
}

}  // namespace kvkeep::cuda
