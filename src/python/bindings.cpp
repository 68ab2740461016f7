// SPDX-License-Identifier: Apache-2.0
// The Keeper for Python. Arrays are anything that speaks DLPack (PyTorch, NumPy, JAX): nothing is copied.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <nanobind/trampoline.h>

#include "kvkeep/core/error.h"
#include "kvkeep/io/kept_page.h"
#include "kvkeep/keeper/metrics.h"
#include "kvkeep/keeper/thread_pool.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/plugin.h"
#include "kvkeep/version.h"
#include "results.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvkeep::python {
namespace {

/// What a caller gave, for messages: "int64 (4,)"; what is no array, by its type.
std::string shown(nb::handle given) {
  std::string said = nb::cast<std::string>(given.type().attr("__name__"));
  if (!nb::hasattr(given, "dtype") || !nb::hasattr(given, "shape")) return said;
  said = nb::str(nb::object(given.attr("dtype"))).c_str();
  if (said.starts_with("torch.")) said.erase(0, 6);
  return text(said, " ", nb::repr(nb::tuple(nb::object(given.attr("shape")))).c_str());
}

/// An argument that is taken whatever it is, so that who reads it can say what is wrong with it: nanobind's own error
/// names no argument and no reason.
struct Array {
  nb::object given = nb::none();
  std::optional<nb::ndarray<nb::ro>> held;  ///< none: None, or no array
  bool writable = false;
};

template <class T>
struct List {
  nb::object given = nb::none();
  std::optional<std::vector<T>> held;

  [[nodiscard]] std::vector<T> of(const char* what) && {
    KVKEEP_REQUIRE(held || given.is_none(), what, ": ", shown(given), "; allowed ",
                   std::is_integral_v<T> ? "integers" : "numbers", ", in a list or a flat array");
    return std::move(held).value_or(std::vector<T>());
  }
};

/// "name,key=value,..." or a JSON object; a dict is one.
struct PolicyArgument {
  nb::object given = nb::none();
  std::optional<std::string> held;

  [[nodiscard]] std::unique_ptr<KVPolicy> made() const {
    KVKEEP_REQUIRE(held.has_value(), "policy: ", shown(given),
                   "; allowed 'name,key=value,...', or a JSON object as text or a dict");
    return held->starts_with('{') ? make_policy_from_json(*held) : make_policy(*held);
  }
};

using Ids = std::vector<SequenceId>;
using Ints = std::vector<std::int32_t>;
using Steps = std::variant<std::int32_t, Ints>;  // tokens of the next step, or of each of the next ones
using IdList = List<SequenceId>;
using IntList = List<std::int32_t>;

Ints steps_of(const Steps& tokens) {
  const auto* const one = std::get_if<std::int32_t>(&tokens);
  return one != nullptr ? Ints{*one} : std::get<Ints>(tokens);
}

}  // namespace
}  // namespace kvkeep::python

namespace nanobind::detail {

namespace python = kvkeep::python;

template <>
struct type_caster<python::Array> {
  NB_TYPE_CASTER(python::Array, make_caster<ndarray<>>::Name)

  bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    value = {.given = borrow(src), .held = {}, .writable = false};
    if (src.is_none()) return true;
    make_caster<ndarray<>> written;
    make_caster<ndarray<ro>> read;
    value.writable = written.from_python(src, flags, cleanup);
    if (value.writable)
      value.held.emplace(written.value);
    else if (read.from_python(src, flags, cleanup))
      value.held.emplace(read.value);
    return true;
  }
};

template <class T>
struct type_caster<python::List<T>> {
  NB_TYPE_CASTER(python::List<T>, make_caster<std::vector<T>>::Name)

  bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    value = {.given = borrow(src), .held = {}};
    make_caster<std::vector<T>> list;
    flags |= static_cast<std::uint8_t>(cast_flags::convert);
    if (list.from_python(src, flags, cleanup)) {
      value.held = std::move(list.value);
      return true;
    }
    try {  // an array of torch
      if (hasattr(src, "tolist") && list.from_python(src.attr("tolist")(), flags, cleanup))
        value.held = std::move(list.value);
    } catch (...) {
      value.held.reset();
    }
    return true;
  }
};

template <>
struct type_caster<python::PolicyArgument> {
  NB_TYPE_CASTER(python::PolicyArgument, const_name("str | dict"))

  bool from_python(handle src, std::uint32_t, cleanup_list*) noexcept {
    value = {.given = borrow(src), .held = {}};
    try {
      if (isinstance<str>(src))
        value.held = cast<std::string>(src);
      else if (isinstance<dict>(src))
        value.held = cast<std::string>(module_::import_("json").attr("dumps")(src));
    } catch (...) {
      value.held.reset();
    }
    return true;
  }
};

}  // namespace nanobind::detail

namespace kvkeep::python {
namespace {

Dtype dtype_of(nb::dlpack::dtype t, const char* what) {
  struct Known {
    std::uint8_t code, bits;
    Dtype dtype;
  };
  constexpr auto code = [](nb::dlpack::dtype_code c) { return static_cast<std::uint8_t>(c); };
  using enum nb::dlpack::dtype_code;
  static constexpr std::uint8_t kE4m3 = 10, kE5m2 = 12;
  const Known known[] = {{code(Float), 32, Dtype::f32}, {code(Float), 16, Dtype::f16}, {code(Bfloat), 16, Dtype::bf16},
                         {code(Float), 64, Dtype::f64}, {code(Int), 64, Dtype::i64},   {code(Int), 32, Dtype::i32},
                         {code(Int), 8, Dtype::i8},     {code(UInt), 8, Dtype::u8},    {kE4m3, 8, Dtype::f8_e4m3},
                         {kE5m2, 8, Dtype::f8_e5m2}};
  for (const Known& one : known)
    if (one.code == t.code && one.bits == t.bits && t.lanes == 1) return one.dtype;
  refuse(what, ": its dtype has DLPack's code ", int{t.code}, " and ", int{t.bits},
         " bits; allowed floats, bfloat16, int8, int32, int64, uint8, float8 e4m3fn and e5m2");
}

/// Why an object that speaks DLPack gives no array: its own words.
std::string why_not(nb::handle given) {
  try {
    if (nb::hasattr(given, "__dlpack__")) static_cast<void>(given.attr("__dlpack__")());
  } catch (nb::python_error& error) {
    return text(" (", nb::cast<std::string>(nb::str(error.value())), ")");
  }
  return "";
}

enum class Access : std::uint8_t { read, write };

Tensor view_of(const Array& array, const char* what, Access access = Access::read) {
  if (array.given.is_none()) return {};
  if (!array.held)
    refuse(what, ": ", shown(array.given), why_not(array.given),
           "; allowed arrays that speak DLPack, as those of torch, NumPy and JAX do");
  KVKEEP_REQUIRE(access == Access::read || array.writable, what, ": ", shown(array.given),
                 ", read-only; allowed arrays that an event may write");
  const nb::ndarray<nb::ro>& a = *array.held;
  std::vector<std::int64_t> sizes, strides;
  for (std::size_t d = 0; d < a.ndim(); ++d) {
    sizes.push_back(static_cast<std::int64_t>(a.shape(d)));
    strides.push_back(a.stride(d));
  }
  Device device;
  if (a.device_type() == nb::device::cuda::value)
    device = {.kind = Device::Kind::cuda, .index = a.device_id()};
  else if (a.device_type() != nb::device::cpu::value)
    device = {.kind = Device::Kind::other, .index = a.device_id()};
  return {const_cast<void*>(a.data()), dtype_of(a.dtype(), what), Shape(sizes), Shape(strides), device};
}

/// What a keeper goes on reading: a copy, or on a GPU the array itself.
Tensor projection_of(const std::optional<Array>& given) {
  if (!given) return {};
  const Tensor seen = view_of(*given, "output_projections");
  if (seen.device().is_cpu()) return clone(seen);
  auto held = std::make_unique<nb::ndarray<nb::ro>>(*given->held);
  return {seen.bytes(), seen.dtype(), seen.sizes(), seen.strides(), seen.device(), Owner::of(std::move(held))};
}

template <class E>
E one_of(const std::string& said, std::initializer_list<const char*> names, const char* what) {
  int index = 0;
  for (const char* name : names) {
    if (said == name) return static_cast<E>(index);
    ++index;
  }
  refuse(what, ": given '", said, "'; allowed ", joined(names));
}

QueryBasis basis_of(const std::string& said) { return one_of<QueryBasis>(said, {"pre_rope", "post_rope"}, "basis"); }

/// i32 in host memory that an event writes.
std::span<std::int32_t> lengths_of(const Array& array) {
  const Tensor lengths = array.held ? view_of(array, "lengths") : Tensor();
  const bool fits = lengths.defined() && lengths.dtype() == Dtype::i32 && lengths.is_contiguous();
  if (!fits || !array.writable || lengths.device().kind != Device::Kind::cpu)
    refuse("lengths: ", shown(array.given), fits && !array.writable ? ", read-only" : "",
           "; allowed an array of int32, contiguous, writable, on the CPU");
  return {lengths.data<std::int32_t>(), static_cast<std::size_t>(lengths.numel())};
}

/// The cache of a step, as long as the arguments of the call live.
class View {
 public:
  View(const ModelSpec& spec, const std::vector<std::optional<std::vector<Array>>>& given, Ids sequences,
       const Array& lengths_in, IntList places, IntList starts, const Array& block_table,
       const std::string& page_layout, PageAllocator* pages, const std::string& shared_pages)
      : sequences_(std::move(sequences)),
        places_(std::move(places).of("places")),
        starts_(std::move(starts).of("starts")) {
    const auto layout = one_of<PageLayout>(page_layout, {"slot_head", "head_slot"}, "page_layout");
    view.block_table = view_of(block_table, "block_table", Access::write);
    for (const auto& layer : given) {
      if (!layer) {
        layers.emplace_back();
        continue;
      }
      KVKEEP_REQUIRE(layer->size() == 2 || layer->size() == 4 || layer->size() == 5, "layers: a layer has ",
                     layer->size(),
                     " arrays; allowed (keys, values), (keys, values, key_scales, value_scales), or these and extras; "
                     "None: no scales");
      Tensor all[5];
      for (std::size_t i = 0; i < layer->size(); ++i) all[i] = view_of((*layer)[i], "layers", Access::write);
      if (view.block_table.defined())
        layers.emplace_back(PagedKv{all[0], all[1], layout, all[2], all[3], 0, 0, all[4]});
      else
        layers.emplace_back(DenseKv{all[0], all[1], all[2], all[3], 0, 0, all[4]});
    }
    const std::span<std::int32_t> lengths = lengths_of(lengths_in);
    const auto n = static_cast<std::int64_t>(sequences_.size());
    const std::int64_t rows = std::int64_t{spec.num_layers()} * spec.kv_heads, held = std::ssize(lengths);
    KVKEEP_REQUIRE(held == n || held == n * rows, "lengths: ", held, " numbers for ", n,
                   " sequences; allowed one each, or one for each of ", rows, " rows");
    view.lengths = {lengths, held == n ? 1 : static_cast<std::int32_t>(rows)};
    view.sequences = sequences_;
    view.places = places_;
    view.starts = starts_;
    view.pages = pages;
    view.shared_pages = one_of<SharedPages>(shared_pages, {"copy", "refuse"}, "shared_pages");
  }
  std::vector<LayerKv> layers;
  CacheView view;

 private:
  Ids sequences_;
  Ints places_, starts_;
};

/// What kvkeep::Observation refers to.
struct Seen {
  Seen(std::int32_t layer, IdList sequences_in, IntList indptr_in, const Array& queries, const std::string& basis,
       bool unread, const Array& log_sum_exp, IntList positions_in)
      : sequences(std::move(sequences_in).of("sequences")),
        indptr(std::move(indptr_in).of("indptr")),
        positions(std::move(positions_in).of("positions")) {
    observation = {.layer = layer,
                   .sequences = sequences,
                   .indptr = indptr,
                   .queries = view_of(queries, "queries"),
                   .basis = basis_of(basis),
                   .unread = unread,
                   .log_sum_exp = view_of(log_sum_exp, "log_sum_exp"),
                   .positions = positions};
  }
  Ids sequences;
  Ints indptr, positions;
  Observation observation;
};

nb::ndarray<nb::numpy, std::int32_t> numbers(std::span<const std::int32_t> from) {
  auto* const copied = new Ints(from.begin(), from.end());
  const nb::capsule owner(copied, [](void* held) noexcept { delete static_cast<Ints*>(held); });
  return {copied->data(), {copied->size()}, owner};
}

class PyPageAllocator : public PageAllocator {
 public:
  NB_TRAMPOLINE(PageAllocator, 3);
  std::int32_t references(std::int32_t page) const override { NB_OVERRIDE_PURE(references, page); }
  std::int32_t take() override { NB_OVERRIDE_PURE(take); }
  void give_back(std::int32_t page) override { NB_OVERRIDE_PURE(give_back, page); }
};

RopeSpec make_rope(List<double> inv_freq, const std::string& style, double attention_scaling) {
  RopeSpec rope{.style = one_of<RopeStyle>(style, {"half", "interleaved", "none"}, "rope_style"),
                .inv_freq = std::move(inv_freq).of("inv_freq"),
                .attention_scaling = attention_scaling};
  rope.check("Rope");
  return rope;
}

ModelSpec make_spec(std::int32_t query_heads, std::int32_t kv_heads, std::int32_t key_dim, std::int32_t num_layers,
                    std::optional<std::int32_t> value_dim, List<double> inv_freq, const std::string& rope_style,
                    double attention_scaling, double softmax_scale,
                    const std::vector<std::pair<std::int32_t, std::int32_t>>& sliding,
                    const std::vector<std::pair<std::int32_t, std::int32_t>>& shared, const Ints& other,
                    const std::map<std::int32_t, RopeSpec>& layer_ropes,
                    const std::map<std::int32_t, std::vector<float>>& layer_sinks, double logit_cap) {
  ModelSpec spec;
  spec.query_heads = query_heads;
  spec.kv_heads = kv_heads;
  spec.key_dim = key_dim;
  spec.value_dim = value_dim.value_or(key_dim);
  spec.softmax_scale = softmax_scale;
  spec.rope = make_rope(std::move(inv_freq), rope_style, attention_scaling);
  KVKEEP_REQUIRE(num_layers >= 1, "num_layers is ", num_layers, "; allowed 1 or more");
  spec.layers.resize(static_cast<std::size_t>(num_layers));
  const auto at = [&](std::int32_t layer, const char* what) -> LayerSpec& {
    KVKEEP_REQUIRE(layer >= 0 && layer < num_layers, what, ": layer ", layer, "; allowed 0 to ", num_layers - 1);
    return spec.layers[static_cast<std::size_t>(layer)];
  };
  for (const auto& [layer, window] : sliding) at(layer, "sliding") = {.kind = LayerKind::sliding, .window = window};
  for (const auto& [layer, source] : shared) at(layer, "shared") = {.kind = LayerKind::shared, .source = source};
  for (const std::int32_t layer : other) at(layer, "other") = {.kind = LayerKind::other};
  for (const auto& [layer, rope] : layer_ropes) at(layer, "layer_ropes").rope = rope;
  for (const auto& [layer, sinks] : layer_sinks) at(layer, "layer_sinks").sinks = sinks;
  spec.logit_cap = logit_cap;
  spec.check();
  return spec;
}

template <class Body>
auto without_gil(Body&& body) {
  const nb::gil_scoped_release released;
  return body();
}

void bind_pages(nb::module_& m) {
  nb::class_<PageAllocator, PyPageAllocator>(
      m, "PageAllocator", "Who holds which page. Derive from it over your own block manager, or use PagePool.")
      .def(nb::init<>())
      .def("references", &PageAllocator::references, "page"_a, "Number of holders of a page.")
      .def("take", &PageAllocator::take, "A free page, now held once; -1 if there is none.")
      .def("give_back", &PageAllocator::give_back, "page"_a, "Removes one holder.");
  nb::class_<PagePool, PageAllocator>(m, "PagePool", "A fixed number of pages, and the holders of each.")
      .def(nb::init<std::int32_t, std::int32_t>(), "pages"_a, "page_size"_a)
      .def("retain", &PagePool::retain, "page"_a, "Adds one holder.")
      .def_prop_ro("free_pages", &PagePool::free_pages)
      .def_prop_ro("page_size", &PagePool::page_size);
}

void bind_keeper(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that wait for the loops of one keeper or several.")
      .def(nb::init<std::int32_t>(), "count"_a, "count: with the calling thread.")
      .def_prop_ro("count", &ThreadPool::count);
  nb::class_<Machine>(m, "Machine", "Where a keeper's events run: see kvkeep.cuda.")
      .def_prop_ro("device", [](const Machine& self) { return self.device().str(); });
  using Layers = std::vector<std::optional<std::vector<Array>>>;
  nb::class_<Keeper>(
      m, "Keeper",
      "Keeps positions and queries of living sequences, decides which slots of the cache stay, and moves "
      "them. One thread at a time.")
      .def(
          "__init__",
          [](Keeper* self, const ModelSpec& spec, const PolicyArgument& policy, bool queries, bool layer_by_layer,
             bool surprisal, bool given_scores, bool reads_folded,
             const std::vector<std::optional<Array>>& output_projections, ThreadPool* threads,
             std::shared_ptr<Machine> accelerator) {
            Provided provided{.queries = queries,
                              .layer_by_layer = layer_by_layer,
                              .surprisal = surprisal,
                              .given_scores = given_scores,
                              .reads_folded = reads_folded};
            for (const std::optional<Array>& one : output_projections)
              provided.output_projections.push_back(projection_of(one));
            if (threads != nullptr) provided.threads = threads->threads();
            provided.accelerator = std::move(accelerator);
            new (self) Keeper(spec, policy.made(), std::move(provided));
          },
          "spec"_a, "policy"_a.none(), nb::kw_only(), "queries"_a = true, "layer_by_layer"_a = false,
          "surprisal"_a = false, "given_scores"_a = false, "reads_folded"_a = false,
          "output_projections"_a = nb::list(), "threads"_a = nb::none(), "accelerator"_a = nb::none(),
          nb::keep_alive<1, 10>(),
          "policy: 'name,key=value,...' or a JSON object, as text or a dict. The flags say what the engine supplies. "
          "threads: a ThreadPool, None: the calling thread. accelerator: kvkeep.cuda.accelerator() of the GPU that "
          "has cache and queries, None: the CPU.")
      .def("join", &Keeper::join, "sequence"_a, "tokens"_a = 0, "prompt"_a = nb::none(),
           "A sequence begins. tokens: already cached; prompt: tokens of its prompt, None: the first step tells, "
           "OPEN_PROMPT: end_prompt() does.")
      .def("leave", &Keeper::leave, "sequence"_a, "A sequence ends: the keeper forgets it.")
      .def(
          "reset", [](Keeper& self, SequenceId sequence) { self.leave(sequence), self.join(sequence); }, "sequence"_a)
      .def("knows", &Keeper::knows, "sequence"_a)
      .def("end_prompt", &Keeper::end_prompt, "sequence"_a)
      .def(
          "pin",
          [](Keeper& self, SequenceId sequence, std::int64_t begin, std::int64_t end) {
            self.part<parts::Pins>().pin(sequence, begin, end);
          },
          "sequence"_a, "begin"_a, "end"_a, "Logical positions [begin, end) stay.")
      .def(
          "unpin",
          [](Keeper& self, SequenceId sequence, std::int64_t begin, std::int64_t end) {
            self.part<parts::Pins>().unpin(sequence, begin, end);
          },
          "sequence"_a, "begin"_a, "end"_a)
      .def("truncate", &Keeper::truncate, "sequence"_a, "logical_length"_a, "Takes back the newest tokens.")
      .def("fork", &Keeper::fork, "child"_a, "parent"_a, "tokens"_a = nb::none(), "prompt"_a = nb::none(),
           "A sequence begins as the first `tokens` of another, None: all, with its window, credit and pins. prompt: "
           "tokens of its prompt, None: as the parent's.")
      .def(
          "save",
          [](const Keeper& self, SequenceId sequence, const std::optional<std::filesystem::path>& file) -> nb::object {
            if (file) {
              self.save(sequence, *file);
              return nb::none();
            }
            const std::vector<std::byte> state = self.save(sequence);
            return nb::bytes(state.data(), state.size());
          },
          "sequence"_a, "file"_a = nb::none(), "The keeper's state of a sequence: bytes, or in a file.")
      .def(
          "restore",
          [](Keeper& self, SequenceId sequence, const nb::bytes& state, std::optional<std::int32_t> prompt,
             std::optional<std::int64_t> tokens) {
            self.restore(sequence, {static_cast<const std::byte*>(state.data()), state.size()}, prompt, tokens);
          },
          "sequence"_a, "state"_a, "prompt"_a = nb::none(), "tokens"_a = nb::none(),
          "From what save() gave: bytes, or the path of a file. prompt: tokens of its prompt, None: as it was saved. "
          "tokens: of those saved, the first ones that it begins with, as in fork(); None: all.")
      .def(
          "restore",
          [](Keeper& self, SequenceId sequence, const std::filesystem::path& file, std::optional<std::int32_t> prompt,
             std::optional<std::int64_t> tokens) { self.restore(sequence, file, prompt, tokens); },
          "sequence"_a, "file"_a, "prompt"_a = nb::none(), "tokens"_a = nb::none())
      .def(
          "observe",
          [](Keeper& self, std::int32_t layer, IdList sequences, IntList indptr, const Array& queries,
             const std::string& basis, bool unread, const Array& log_sum_exp, IntList positions) {
            const Seen seen(layer, std::move(sequences), std::move(indptr), queries, basis, unread, log_sum_exp,
                            std::move(positions));
            without_gil([&] { self.observe(seen.observation); });
          },
          "layer"_a, "sequences"_a, "indptr"_a, "queries"_a = nb::none(), nb::kw_only(), "basis"_a = "pre_rope",
          "unread"_a = false, "log_sum_exp"_a = nb::none(), "positions"_a = nb::none(),
          "Records the new tokens of one layer: queries f32, f16 or bf16 [tokens, Hq, D], those of sequence i at "
          "[indptr[i], indptr[i + 1]).")
      .def(
          "give",
          [](Keeper& self, std::int32_t layer, IdList sequences, IntList indptr, const Array& scores) {
            const Ids ids = std::move(sequences).of("sequences");
            const Ints ends = std::move(indptr).of("indptr");
            self.part<parts::Given>().give(
                {.layer = layer, .sequences = ids, .indptr = ends, .scores = view_of(scores, "scores")});
          },
          "layer"_a, "sequences"_a, "indptr"_a, "scores"_a, "Scores of the engine's own: [tokens, Hkv].")
      .def(
          "surprise",
          [](Keeper& self, SequenceId sequence, const std::vector<float>& nats) {
            self.part<parts::Surprisal>().supply(sequence, nats);
          },
          "sequence"_a, "nats"_a)
      .def(
          "prefetch",
          [](Keeper& self, std::int32_t layer, IdList sequences, IntList indptr, const Array& queries) {
            const Seen seen(layer, std::move(sequences), std::move(indptr), queries, "post_rope", false, {}, {});
            auto* const part = self.find<parts::Folds>();
            if (part != nullptr) without_gil([&] { part->prefetch(seen.observation); });
          },
          "layer"_a, "sequences"_a, "indptr"_a, "queries"_a,
          "Optional, before the attention of the layer: on a GPU, begins what view() of the same queries does beside "
          "it. "
          "They stay as they are until then.")
      .def(
          "view",
          [](Keeper& self, std::int32_t layer, IdList sequences, IntList indptr, const Array& queries, const Array& out,
             const Array& log_sum_exp) {
            const Seen seen(layer, std::move(sequences), std::move(indptr), queries, "post_rope", false, {}, {});
            const Attended attended{view_of(out, "out", Access::write),
                                    view_of(log_sum_exp, "log_sum_exp", Access::write)};
            auto* const part = self.find<parts::Folds>();
            if (part != nullptr) without_gil([&] { static_cast<void>(part->view(seen.observation, attended)); });
          },
          "layer"_a, "sequences"_a, "indptr"_a, "queries"_a, "out"_a, "log_sum_exp"_a,
          "Merges folded spans into what attention gave over the rows, in place: f32 [tokens, Hq, Dv] and [tokens, "
          "Hq].")
      .def(
          "step",
          [](Keeper& self, const Layers& layers, IdList sequences, const Array& lengths, IntList places, IntList starts,
             const Array& block_table, const std::string& page_layout, PageAllocator* pages,
             const std::string& shared_pages, IdList named_in) {
            View view(self.spec(), layers, std::move(sequences).of("sequences"), lengths, std::move(places),
                      std::move(starts), block_table, page_layout, pages, shared_pages);
            const Ids named = std::move(named_in).of("named");
            view.view.named = named;
            return without_gil([&] {
              self.bind(std::move(view.layers));
              return self.step(view.view).wait();
            });
          },
          "layers"_a, "sequences"_a, "lengths"_a, nb::kw_only(), "places"_a = nb::none(), "starts"_a = nb::none(),
          "block_table"_a = nb::none(), "page_layout"_a = "slot_head", "pages"_a = nb::none(),
          "shared_pages"_a = "copy", "named"_a = nb::none(),
          "Cuts what is due. layers: (keys, values) of each, [B, Hkv, capacity, D] or in pages, None: no rows of its "
          "own; lengths: int32 [n] or [n, layers * Hkv], contiguous, this step's tokens included: an event writes the "
          "new ones. named: sequences whose event comes now, by the program's word, if they hold more than the "
          "budget.")
      .def(
          "narrow",
          [](Keeper& self, std::int32_t layer, IdList sequences, IntList indptr, const Array& queries,
             const Layers& layers, const Array& lengths, const std::string& basis, IntList places,
             const Array& block_table, const std::string& page_layout, PageAllocator* pages) {
            const Seen seen(layer, std::move(sequences), std::move(indptr), queries, basis, false, {}, {});
            View view(self.spec(), layers, seen.sequences, lengths, std::move(places), {}, block_table, page_layout,
                      pages, "copy");
            auto* const part = self.find<parts::Prompts>();
            return without_gil([&] {
              if (part == nullptr) return LayerReport{};
              self.bind(std::move(view.layers));
              return part->narrow(seen.observation, view.view);
            });
          },
          "layer"_a, "sequences"_a, "indptr"_a, "queries"_a, "layers"_a, "lengths"_a, nb::kw_only(),
          "basis"_a = "pre_rope", "places"_a = nb::none(), "block_table"_a = nb::none(), "page_layout"_a = "slot_head",
          "pages"_a = nb::none(),
          "Under a policy that narrows prompts: after the attention of each layer, which tokens continue.")
      .def("logical_length", &Keeper::logical_length, "sequence"_a, "Tokens seen; the position of the next one.")
      .def("physical_length", &Keeper::physical_length, "sequence"_a, "layer"_a, "head"_a, "Slots of one row.")
      .def("rollback_limit", &Keeper::rollback_limit, "sequence"_a,
           "Its newest tokens that truncate() can take back; 0 right after an event.")
      .def("whole_prefix", &Keeper::whole_prefix, "sequence"_a,
           "Its oldest tokens that no event has touched, in any row: a prefix cache may take in whole pages of them.")
      .def("evicted", &Keeper::evicted, "sequence"_a,
           "Its tokens that are in no row any more: logical less cached length. Refused where rows differ in length.")
      .def(
          "tokens_to_event",
          [](const Keeper& self, SequenceId sequence) -> std::optional<std::int64_t> {
            const std::int64_t away = self.tokens_to_event(sequence);
            if (away == Trigger::kNoEvent) return std::nullopt;
            return away;
          },
          "sequence"_a, "The fewest tokens with which an event may cut the sequence; None: none will.")
      .def_prop_ro("queries_read", &Keeper::queries_read, "Newest queries of every full layer that an event reads.")
      .def_prop_ro(
          "turns", [](const Keeper& self) { return self.policy().needs().rope; },
          "The policy turns queries or keys, so that RoPE and positions must be the model's.")
      .def(
          "positions",
          [](const Keeper& self, SequenceId sequence, std::int32_t layer, std::int32_t head) {
            return numbers(self.positions(sequence, layer, head));
          },
          "sequence"_a, "layer"_a, "head"_a, "Logical positions of the slots of one row: int32, a copy.")
      .def(
          "length_after",
          [](const Keeper& self, SequenceId sequence, const Steps& tokens) {
            LengthForecast ahead = self.forecast(sequence);
            ahead.step(steps_of(tokens));
            return std::tuple(ahead.length(), ahead.event(), ahead.exact());
          },
          "sequence"_a, "tokens"_a = 1,
          "tokens: of the next step, or a list of those of the next steps. (slots of its longest row after the last of "
          "them, whether that one cuts it, whether both are exact or the most).")
      .def(
          "pages_needed",
          [](const Keeper& self, SequenceId sequence, const Steps& tokens, std::int32_t page_size,
             std::int32_t shared_pages, bool last_shared) {
            const Ints of_steps = steps_of(tokens);
            const PageNeed need = self.forecast(sequence).need(std::span<const std::int32_t>(of_steps), page_size,
                                                               shared_pages, last_shared);
            return std::tuple(need.append, need.event);
          },
          "sequence"_a, "tokens"_a, "page_size"_a, "shared_pages"_a, "last_shared"_a = true,
          "The most pages that a step of so many tokens, or the last of a list of steps, takes: (for its tokens and "
          "for copies of shared pages that they are written to, for copies that its event writes). shared_pages: how "
          "many of the sequence's pages others will hold too by then. last_shared: False if its last page is none of "
          "them, "
          "as under a cache of whole pages.")
      .def(
          "metrics",
          [](const Keeper& self, const std::string& labels) {
            const KeeperMetrics own{self.totals(), labels};
            return prometheus_metrics({&own, 1});
          },
          "labels"_a = "", "Totals and times of events as Prometheus reads them. labels: of every sample.")
      .def_prop_ro(
          "device", [](const Keeper& self) { return self.device().str(); }, "Of cache and queries: 'cpu', or 'cuda:0'.")
      .def_prop_ro("policy_json", [](const Keeper& self) { return self.policy().to_json(); })
      .def_prop_ro("totals", [](const Keeper& self) { return self.totals(); })
      .def_prop_ro("spec", [](const Keeper& self) { return self.spec(); });
}

}  // namespace
}  // namespace kvkeep::python

NB_MODULE(_kvkeep, m) {
  using namespace kvkeep;
  nb::set_leak_warnings(false);  // a traceback that holds a keeper at exit is no fault
  m.attr("__version__") = kVersion;
  m.attr("OPEN_PROMPT") = kOpenPrompt;
  nb::exception<InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);
  nb::exception<StateError>(m, "StateError", PyExc_RuntimeError);
  nb::exception<Unsupported>(m, "Unsupported", PyExc_NotImplementedError);
  nb::exception<DeviceError>(m, "DeviceError", PyExc_RuntimeError);
  nb::class_<RopeSpec>(m, "Rope", "RoPE of a layer, after any scaling.")
      .def(nb::new_(&python::make_rope), "inv_freq"_a = nb::none(), "style"_a = "half", "attention_scaling"_a = 1.0,
           "inv_freq: radians per position of each pair. style: 'half', 'interleaved', or 'none', without frequencies.")
      .def_ro("inv_freq", &RopeSpec::inv_freq)
      .def_prop_ro("style", [](const RopeSpec& rope) { return name_of(rope.style); })
      .def_ro("attention_scaling", &RopeSpec::attention_scaling)
      .def_prop_ro("stated", &RopeSpec::stated, "False: left open, and what turns queries or keys is refused.");
  nb::class_<ModelSpec>(m, "ModelSpec", "Shapes and conventions of one model.")
      .def(nb::new_(&python::make_spec), "query_heads"_a, "kv_heads"_a, "key_dim"_a, "num_layers"_a, nb::kw_only(),
           "value_dim"_a = nb::none(), "inv_freq"_a = nb::none(), "rope_style"_a = "half", "attention_scaling"_a = 1.0,
           "softmax_scale"_a = 0.0, "sliding"_a = std::vector<std::pair<std::int32_t, std::int32_t>>(),
           "shared"_a = std::vector<std::pair<std::int32_t, std::int32_t>>(), "other"_a = std::vector<std::int32_t>(),
           "layer_ropes"_a = std::map<std::int32_t, RopeSpec>(),
           "layer_sinks"_a = std::map<std::int32_t, std::vector<float>>(), "logit_cap"_a = 0.0,
           "inv_freq: radians per position of each RoPE pair, after scaling; rope_style: 'half', 'interleaved' or "
           "'none'; layer_ropes: {layer: Rope} where a layer's differs. sliding: (layer, window) of the layers that "
           "attend to the newest tokens only; shared: (layer, source) of those that read an earlier layer's cache; "
           "other: those without keys and values. layer_sinks: {layer: a logit for each query head} that joins the "
           "softmax beside the keys (gpt-oss), -inf: none; logit_cap: c of logits c tanh(x / c) (Gemma 2), 0: none.")
      .def_ro("logit_cap", &ModelSpec::logit_cap)
      .def(
          "sinks",
          [](const ModelSpec& spec, std::int32_t layer) {
            KVKEEP_REQUIRE(layer >= 0 && layer < spec.num_layers(), "sinks: layer ", layer, "; allowed 0 to ",
                           spec.num_layers() - 1);
            return spec.layers[static_cast<std::size_t>(layer)].sinks;
          },
          "layer"_a, "Sink logits of one layer, one for each query head; empty: none.")
      .def(
          "rope",
          [](const ModelSpec& spec, std::int32_t layer) {
            KVKEEP_REQUIRE(layer >= 0 && layer < spec.num_layers(), "rope: layer ", layer, "; allowed 0 to ",
                           spec.num_layers() - 1);
            return spec.rope_of(layer);
          },
          "layer"_a, "RoPE of one layer.")
      .def_ro("query_heads", &ModelSpec::query_heads)
      .def_ro("kv_heads", &ModelSpec::kv_heads)
      .def_ro("key_dim", &ModelSpec::key_dim)
      .def_ro("value_dim", &ModelSpec::value_dim)
      .def_prop_ro("num_layers", &ModelSpec::num_layers)
      .def_prop_ro("full_layers", &ModelSpec::full_layers);
  python::bind_results(m);
  python::bind_pages(m);
  python::bind_keeper(m);
  m.def(
      "_kept_page",
      [](std::string model, std::string policy, std::vector<std::string> pieces, std::int32_t prompt,
         python::Ints layers, std::int32_t kv_heads,
         std::vector<std::tuple<std::string, std::int32_t, std::int64_t, std::vector<python::Ints>>> stops) {
        io::KeptText text{.model = std::move(model),
                          .policy = std::move(policy),
                          .pieces = std::move(pieces),
                          .prompt = prompt,
                          .layers = std::move(layers),
                          .kv_heads = kv_heads};
        for (auto& [name, present, bytes, rows] : stops)
          text.stops.push_back({std::move(name), present, bytes, std::move(rows)});
        return io::kept_page(text);
      },
      nb::kw_only(), "model"_a, "policy"_a, "pieces"_a, "prompt"_a, "layers"_a, "kv_heads"_a, "stops"_a,
      "kvkeep/io/kept_page.h; a stop is (name, present, bytes, rows).");
  m.def(
      "_policy_text",
      [](const python::PolicyArgument& policy) {
        static_cast<void>(policy.made());
        return *policy.held;
      },
      "policy"_a.none(), "A policy that could be made, as text.");
  m.def(
      "policies",
      [] {
        nb::list all;
        for (const PolicyInfo& info : policies()) {
          nb::dict one;
          one["name"] = info.name;
          one["what"] = info.what;
          one["source"] = info.source;
          one["needs"] = info.needs;
          one["narrows"] = info.narrows;
          nb::dict options;
          for (const OptionInfo& option : info.options) {
            nb::dict about;
            about["default"] = option.fallback;
            about["allowed"] = option.allowed;
            about["what"] = option.what;
            options[option.name.c_str()] = about;
          }
          one["options"] = options;
          all.append(one);
        }
        return all;
      },
      "Every policy that this process knows, with its options.");
  m.def(
      "prometheus_metrics",
      [](std::vector<std::pair<Totals, std::string>> keepers) {
        std::vector<KeeperMetrics> all;
        for (auto& [totals, labels] : keepers) all.push_back({totals, std::move(labels)});
        return prometheus_metrics(all);
      },
      "keepers"_a,
      "One page of several keepers as Prometheus reads it: [(keeper.totals, 'worker=\"0\"'), ...], each with labels of "
      "its "
      "own. Take the totals on the keeper's thread.");
  m.def("load_plugin", &load_plugin, "file"_a,
        "Loads a shared library whose scorers, allocators and policies are then known by name (KVKEEP_PLUGIN() of "
        "kvkeep/policy/plugin.h). Raises InvalidArgument for one that was compiled for another version of kvkeep, that "
        "is no plug-in, or that fails. Loading one again changes nothing.");
  m.def("loaded_plugins", &loaded_plugins, "The files that load_plugin() loaded, in order.");
}
