// SPDX-License-Identifier: Apache-2.0
#pragma once
// What fake_llama.cpp needs of ggml: number types, tensors, operations on them, and a graph that shows its nodes.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvkeep/core/dtype.h"
#include "llama.h"

struct ggml_backend_buffer {
  bool host;
};

namespace fake {

/// Memory of tensors that are on a device, if a test has some: the host reads and writes it while it is open. None:
/// whoever follows a pointer into the device ends there.
struct DeviceMemory {
  void* (*take)(std::size_t bytes) = nullptr;
  void (*give)(void* memory) = nullptr;
  void (*open)() = nullptr;
  void (*close)() = nullptr;
};
inline DeviceMemory device_memory;

/// While one lives, the stand-in works on the device's memory.
struct Working {
  Working() { open(); }
  ~Working() { close(); }
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;
  static void open() {
    if (device_memory.open != nullptr) device_memory.open();
  }
  static void close() {
    if (device_memory.close != nullptr) device_memory.close();
  }
};
/// In the midst of that, it does not.
struct Resting {
  Resting() { Working::close(); }
  ~Resting() { Working::open(); }
  Resting(const Resting&) = delete;
  Resting& operator=(const Resting&) = delete;
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline std::size_t z(std::int64_t value) { return static_cast<std::size_t>(value); }

// ---- Types ----

template <class T>
void decode(const void* from, float* to, std::int64_t count) {
  std::copy_n(static_cast<const T*>(from), count, to);
}

template <class T>
void encode(const float* from, void* to, std::int64_t count) {
  std::transform(from, from + count, static_cast<T*>(to), [](float x) { return T(x); });
}

struct Q8 {
  kvkeep::Half scale;
  std::int8_t values[32];
};

inline void decode_q8(const void* from, float* to, std::int64_t count) {
  const auto* blocks = static_cast<const Q8*>(from);
  for (std::int64_t i = 0; i < count; ++i) to[i] = blocks[i / 32].scale * blocks[i / 32].values[i % 32];
}

inline void encode_q8(const float* from, void* to, std::int64_t count) {
  auto* blocks = static_cast<Q8*>(to);
  for (std::int64_t b = 0; b < count / 32; ++b) {
    float most = 0;
    for (std::int64_t i = 0; i < 32; ++i) most = std::max(most, std::abs(from[32 * b + i]));
    blocks[b].scale = kvkeep::Half(most / 127);
    for (std::int64_t i = 0; i < 32; ++i)
      blocks[b].values[i] = static_cast<std::int8_t>(most == 0 ? 0 : std::lround(from[32 * b + i] * 127 / most));
  }
}

inline const std::map<ggml_type, ggml_type_traits>& all_traits() {
  static const std::map<ggml_type, ggml_type_traits> all{
      {GGML_TYPE_F32, {"f32", 1, 0, 4, false, nullptr, nullptr}},
      {GGML_TYPE_F16, {"f16", 1, 0, 2, false, decode<kvkeep::Half>, encode<kvkeep::Half>}},
      {GGML_TYPE_BF16, {"bf16", 1, 0, 2, false, decode<kvkeep::BFloat16>, encode<kvkeep::BFloat16>}},
      {GGML_TYPE_Q8_0, {"q8_0", 32, 0, sizeof(Q8), true, decode_q8, encode_q8}},
      {GGML_TYPE_I32, {"i32", 1, 0, 4, false, nullptr, nullptr}},
      {GGML_TYPE_I64, {"i64", 1, 0, 8, false, nullptr, nullptr}}};
  return all;
}

// ---- Tensors ----

using Shape = std::array<std::int64_t, GGML_MAX_DIMS>;
using Strides = std::array<std::size_t, GGML_MAX_DIMS>;

inline Strides packed(ggml_type type, const std::int64_t* ne) {
  const std::size_t row = ggml_row_size(type, ne[0]);
  return {ggml_get_type_traits(type)->type_size, row, row * z(ne[1]), row * z(ne[1] * ne[2])};
}

inline ggml_tensor* root_of(ggml_tensor* t) { return t->view_src != nullptr ? t->view_src : t; }

/// Where elements really are, wherever `data` says so: `extra` of what is no view points there.
inline std::byte* memory_of(const ggml_tensor* t) {
  const ggml_tensor* root = t->view_src != nullptr ? t->view_src : t;
  return static_cast<std::byte*>(root->extra) + t->view_offs;
}

/// Elements of a tensor without gaps.
template <class T>
std::span<T> values(const ggml_tensor* t) {
  return {static_cast<T*>(static_cast<void*>(memory_of(t))), z(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3])};
}

/// Rows of a tensor as floats.
class Floats {
 public:
  explicit Floats(const ggml_tensor* t) : ne_{t->ne[0], t->ne[1], t->ne[2], t->ne[3]} {
    if (t->type == GGML_TYPE_F32 && std::ranges::equal(packed(t->type, t->ne), t->nb)) {
      data_ = values<float>(t).data();
      return;
    }
    copied_.resize(z(ne_[0] * rows()));
    const ggml_to_float_t to_float = ggml_get_type_traits(t->type)->to_float;
    for (std::int64_t i = 0; i < rows(); ++i) {
      const std::byte* from = memory_of(t) + z(i % ne_[1]) * t->nb[1] + z(i / ne_[1] % ne_[2]) * t->nb[2] +
                              z(i / ne_[1] / ne_[2]) * t->nb[3];
      float* to = copied_.data() + i * ne_[0];
      if (to_float != nullptr)
        to_float(from, to, ne_[0]);
      else
        std::memcpy(to, from, z(ne_[0]) * sizeof(float));
    }
    data_ = copied_.data();
  }
  [[nodiscard]] std::int64_t rows() const { return ne_[1] * ne_[2] * ne_[3]; }
  [[nodiscard]] const float* row(std::int64_t i1, std::int64_t i2 = 0, std::int64_t i3 = 0) const {
    return data_ + ne_[0] * (i1 + ne_[1] * (i2 + ne_[2] * i3));
  }

 private:
  Shape ne_;
  std::vector<float> copied_;
  const float* data_ = nullptr;
};

/// Writes a row of a tensor without gaps.
inline void store(ggml_tensor* t, std::int64_t i, const float* from) {
  std::byte* to = memory_of(t) + z(i) * t->nb[1];
  if (t->type == GGML_TYPE_F32)
    std::memcpy(to, from, z(t->ne[0]) * sizeof(float));
  else
    ggml_get_type_traits(t->type)->from_float_ref(from, to, t->ne[0]);
}

/// Tensors, and memory for those that are no views.
class Tensors {
 public:
  explicit Tensors(bool host) : buffer_{host} {}
  ~Tensors() {
    for (const auto& [memory, bytes] : taken_) device_memory.give(memory);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  ggml_tensor* make(ggml_type type, const Shape& ne, const std::string& name = {}) {
    ggml_tensor* t = blank(type, ne, name);
    t->buffer = &buffer_;
    if (!buffer_.host && device_memory.take != nullptr) {
      t->data = t->extra = device_memory.take(ggml_nbytes(t));
      taken_.emplace_back(t->data, ggml_nbytes(t));
      const Working working;
      std::memset(t->data, 0, ggml_nbytes(t));
      return t;
    }
    t->extra = bytes_.emplace_back(ggml_nbytes(t)).data();
    t->data = buffer_.host ? t->extra : reinterpret_cast<void*>(std::uintptr_t{0xdead} << 48);
    return t;
  }
  ggml_tensor* view(ggml_tensor* of, const Shape& ne, const Strides& nb, std::size_t offset) {
    ggml_tensor* t = blank(of->type, ne, std::string(of->name).substr(0, 40) + " (view)");
    std::ranges::copy(nb, t->nb);
    t->view_src = root_of(of);
    t->view_offs = of->view_offs + offset;
    t->buffer = of->buffer;
    t->data = static_cast<std::byte*>(of->data) + offset;
    return t;
  }
  [[nodiscard]] bool has(const ggml_tensor* t) const { return t->buffer == &buffer_; }
  void fill(std::byte value) {
    for (std::vector<std::byte>& bytes : bytes_) std::ranges::fill(bytes, value);
    for (const auto& [memory, bytes] : taken_) std::memset(memory, std::to_integer<int>(value), bytes);
  }

 private:
  ggml_tensor* blank(ggml_type type, const Shape& ne, const std::string& name) {
    ggml_tensor& t = all_.emplace_back();
    t.type = type;
    std::ranges::copy(ne, t.ne);
    std::ranges::copy(packed(type, t.ne), t.nb);
    name.copy(t.name, GGML_MAX_NAME - 1);
    return &t;
  }

  ggml_backend_buffer buffer_;
  std::deque<ggml_tensor> all_;
  std::deque<std::vector<std::byte>> bytes_;
  std::vector<std::pair<void*, std::size_t>> taken_;  // of the device
};

// ---- Operations ----

inline float option(const ggml_tensor* t, int i) {
  float value = 0;
  std::memcpy(&value, t->op_params + i, sizeof value);
  return value;
}

inline float dot(const float* a, const float* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += double{a[i]} * b[i];
  return static_cast<float>(sum);
}

/// Products of a query and keys, to weights.
inline void weigh(float scale, const float* mask, std::span<float> row) {
  float most = -kInfinity;
  for (std::size_t i = 0; i < row.size(); ++i)
    most = std::max(most, row[i] = mask[i] == -kInfinity ? -kInfinity : row[i] * scale);
  double sum = 0;
  for (float& weight : row) sum += weight = std::exp(weight - most);
  for (float& weight : row) weight = static_cast<float>(weight / sum);
}

inline void flash_attention(ggml_tensor* t) {
  const ggml_tensor *q = t->src[0], *k = t->src[1];
  const Floats queries(q), keys(k), vals(t->src[2]), masks(t->src[3]);
  std::vector<float> row(z(k->ne[1]));
  float* out = values<float>(t).data();
  for (std::int64_t s = 0; s < q->ne[3]; ++s)
    for (std::int64_t i = 0; i < q->ne[1]; ++i)
      for (std::int64_t h = 0; h < q->ne[2]; ++h) {
        const std::int64_t kv = h / (q->ne[2] / k->ne[2]);
        const float* mask = masks.row(i, 0, s);
        for (std::int64_t n = 0; n < k->ne[1]; ++n)
          if (mask[n] != -kInfinity) row[z(n)] = dot(queries.row(i, h, s), keys.row(n, kv, s), q->ne[0]);
        weigh(option(t, 0), mask, row);
        std::vector<double> sum(z(t->ne[0]));
        for (std::int64_t n = 0; n < k->ne[1]; ++n)
          for (std::int64_t d = 0; mask[n] != -kInfinity && d < t->ne[0]; ++d)
            sum[z(d)] += double{row[z(n)]} * vals.row(n, kv, s)[d];
        out = std::ranges::transform(sum, out, [](double x) { return static_cast<float>(x); }).out;
      }
}

inline void rope(ggml_tensor* t) {
  const Floats in(t->src[0]);
  const std::int64_t rotary = t->op_params[1];
  const bool halves = t->op_params[2] == GGML_ROPE_TYPE_NEOX;
  const double base = option(t, 5), scale = option(t, 6), extrapolation = option(t, 7);
  double magnitude = option(t, 8);
  float ramp[2]{};
  if (extrapolation != 0) {
    magnitude *= 1 + 0.1 * std::log(1 / scale);
    ggml_rope_yarn_corr_dims(t->op_params[1], t->op_params[4], option(t, 5), option(t, 9), option(t, 10), ramp);
  }
  const float* factors = t->src[2] != nullptr ? values<float>(t->src[2]).data() : nullptr;
  for (std::int64_t i = 0; i < in.rows(); ++i) {
    std::vector<float> head(in.row(i), in.row(i + 1));
    const double position = values<std::int32_t>(t->src[1])[z(i / t->ne[1])];
    for (std::int64_t f = 0; f < rotary / 2 && (position != 0 || magnitude != 1); ++f) {
      float& a = head[z(halves ? f : 2 * f)];
      float& b = head[z(halves ? f + rotary / 2 : 2 * f + 1)];
      const double own = position * std::pow(base, -2.0 * double(f) / double(rotary)) / (factors ? factors[f] : 1.0F);
      const double mix =
          extrapolation * (1 - std::clamp((double(f) - ramp[0]) / std::max(1e-3F, ramp[1] - ramp[0]), 0.0, 1.0));
      const double angle = own * scale * (1 - mix) + own * mix;
      const double cosine = std::cos(angle) * magnitude, sine = std::sin(angle) * magnitude, x = a, y = b;
      a = static_cast<float>(x * cosine - y * sine);
      b = static_cast<float>(x * sine + y * cosine);
    }
    store(t, i, head.data());
  }
}

inline void compute(ggml_tensor* t) {
  ggml_tensor* const* src = t->src;
  if (t->op == GGML_OP_FLASH_ATTN_EXT) return flash_attention(t);
  if (t->op == GGML_OP_ROPE) return rope(t);
  if (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE) return;
  const Floats a(src[0]);
  const std::int64_t width = src[0]->ne[0];
  float* out = t->type == GGML_TYPE_F32 ? values<float>(t).data() : nullptr;
  switch (t->op) {
    case GGML_OP_GET_ROWS:
      for (const std::int32_t id : values<std::int32_t>(src[1])) out = std::copy_n(a.row(id), width, out);
      break;
    case GGML_OP_SET_ROWS:
      for (std::int64_t i = 0; i < a.rows(); ++i) store(t, values<std::int64_t>(src[1])[z(i)], a.row(i));
      break;
    case GGML_OP_CPY:
      for (std::int64_t i = 0; i < a.rows(); ++i) store(t, i, a.row(i));
      break;
    case GGML_OP_SCALE:  // by 1
    case GGML_OP_CONT:
      std::copy(a.row(0), a.row(a.rows()), out);
      break;
    case GGML_OP_ADD:
      std::transform(a.row(0), a.row(a.rows()), Floats(src[1]).row(0), out, std::plus());
      break;
    case GGML_OP_TOP_K: {  // of those that the mask shows, as a mask
      constexpr std::size_t kMost = 24;
      const Floats masks(src[1]);
      for (std::int64_t i = 0; i < a.rows(); ++i, out += width) {
        std::vector<std::int64_t> order;
        for (std::int64_t n = 0; n < width; ++n)
          if (masks.row(i)[n] != -kInfinity) order.push_back(n);
        std::ranges::sort(order, std::greater{}, [&](std::int64_t n) { return a.row(i)[n]; });
        if (order.size() > kMost) order.resize(kMost);
        std::fill_n(out, width, -kInfinity);
        for (const std::int64_t n : order) out[n] = 0;
      }
      break;
    }
    case GGML_OP_RMS_NORM:
      for (std::int64_t i = 0; i < a.rows(); ++i) {
        const float scale = 1 / std::sqrt(dot(a.row(i), a.row(i), width) / static_cast<float>(width) + 1e-5F);
        out = std::transform(a.row(i), a.row(i + 1), out, [&](float x) { return x * scale; });
      }
      break;
    case GGML_OP_MUL_MAT: {
      const Floats b(src[1]);
      for (std::int64_t i = 0; i < b.rows(); ++i) {
        const std::int64_t i2 = i / t->ne[1] % t->ne[2], i3 = i / t->ne[1] / t->ne[2];
        for (std::int64_t o = 0; o < t->ne[0]; ++o)
          *out++ = dot(a.row(o, i2 * src[0]->ne[2] / t->ne[2], i3), b.row(i), width);
      }
      break;
    }
    case GGML_OP_SOFT_MAX: {
      const Floats masks(src[1]);
      std::copy(a.row(0), a.row(a.rows()), out);
      for (std::int64_t i = 0; i < a.rows(); ++i, out += width)
        weigh(option(t, 0), masks.row(i % t->ne[1], 0, i / t->ne[1] / t->ne[2]), {out, z(width)});
      break;
    }
    default:
      break;
  }
}

/// Nodes in the order in which they are computed.
class Graph : public Tensors {
 public:
  using Tensors::Tensors;
  std::vector<ggml_tensor*> nodes;

  ggml_tensor* node(ggml_op op, ggml_tensor* made, std::initializer_list<ggml_tensor*> from) {
    made->op = op;
    std::ranges::copy(from, made->src);
    for (ggml_tensor* t : from)
      if (t != nullptr) last_reader_[root_of(t)] = nodes.size();
    if (made->name[0] == '\0') ("node_" + std::to_string(nodes.size())).copy(made->name, GGML_MAX_NAME - 1);
    nodes.push_back(made);
    return made;
  }
  ggml_tensor* view(ggml_op op, ggml_tensor* of, const Shape& ne, const Strides& nb, std::size_t offset = 0) {
    return node(op, Tensors::view(of, ne, nb, offset), {of});
  }
  ggml_tensor* reshape(ggml_tensor* of, const Shape& ne) {
    return view(GGML_OP_RESHAPE, of, ne, packed(of->type, ne.data()));
  }
  /// Rows of tokens and heads change places.
  ggml_tensor* permute(ggml_tensor* of) {
    return view(GGML_OP_PERMUTE, of, {of->ne[0], of->ne[2], of->ne[1], of->ne[3]},
                {of->nb[0], of->nb[2], of->nb[1], of->nb[3]});
  }
  ggml_tensor* multiply(ggml_tensor* a, ggml_tensor* b, const std::string& name = {}) {
    return node(GGML_OP_MUL_MAT, make(GGML_TYPE_F32, {a->ne[1], b->ne[1], b->ne[2], b->ne[3]}, name), {a, b});
  }
  ggml_tensor* normalized(ggml_tensor* a) { return node(GGML_OP_RMS_NORM, like(a), {a}); }
  ggml_tensor* like(const ggml_tensor* a, const std::string& name = {}) {
    return make(GGML_TYPE_F32, {a->ne[0], a->ne[1], a->ne[2], a->ne[3]}, name);
  }
  /// What an operation in place makes.
  ggml_tensor* alias(ggml_tensor* of) {
    return Tensors::view(of, {of->ne[0], of->ne[1], of->ne[2], of->ne[3]}, packed(of->type, of->ne), 0);
  }
  void set_rows(ggml_tensor* cache, const Shape& ne, ggml_tensor* rows, ggml_tensor* at) {
    ggml_tensor* to = reshape(cache, ne);
    node(GGML_OP_SET_ROWS, alias(to), {rows, at, to});
  }
  /// As a scheduler does: asks for nodes until one is wanted, computes up to it, and shows it. False: aborted.
  bool run(const llama_context_params& params) {
    for (std::size_t first = 0, last = 0; first < nodes.size(); first = last + 1) {
      last = first;
      bool wanted = false;
      const auto show = [&](ggml_tensor* node, bool ask) {
        const Resting resting;
        return params.cb_eval(node, ask, params.cb_eval_user_data);
      };
      if (params.cb_eval == nullptr) {
        last = nodes.size() - 1;
      } else {
        wanted = show(nodes[last], true);
        while (!wanted && last + 1 < nodes.size()) wanted = show(nodes[++last], true);
      }
      for (std::size_t i = first; i <= last; ++i) {
        if (params.abort_callback != nullptr && params.abort_callback(params.abort_callback_data)) return false;
        compute(nodes[i]);
      }
      if (wanted && !show(nodes[last], false)) break;
      overwrite(first, last);
    }
    return true;
  }

 private:
  /// Memory of tensors that nobody reads after these nodes becomes somebody else's.
  void overwrite(std::size_t first, std::size_t last) {
    for (const auto& [t, reader] : last_reader_)
      if (reader >= first && reader <= last && has(t)) std::memset(memory_of(t), 0xff, ggml_nbytes(t));
  }

  std::map<ggml_tensor*, std::size_t> last_reader_;
};

}  // namespace fake
