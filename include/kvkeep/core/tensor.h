// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Arrays of numbers, as kvkeep takes and returns them: strided views that share memory and have no arithmetic.
/// kvkeep/torch.h converts them from and to LibTorch's tensors.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <ostream>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/error.h"

namespace kvkeep {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda, other };
  Kind kind = Kind::cpu;
  std::int32_t index = 0;  ///< among devices of this kind

  [[nodiscard]] bool is_cpu() const { return kind == Kind::cpu; }
  [[nodiscard]] bool is_cuda() const { return kind == Kind::cuda; }
  [[nodiscard]] std::string str() const {
    return kind == Kind::cpu ? "cpu" : (kind == Kind::cuda ? "cuda:" : "other:") + std::to_string(index);
  }
  friend bool operator==(const Device&, const Device&) = default;
};

/// Throws Unsupported unless `device` is the CPU: others are served by a Machine.
inline void require_host(const char* operation, Device device) {
  KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu(), operation, ": runs on the CPU; given device ", device.str(),
                    "; allowed cpu, or a Keeper with kvkeep::cuda::accelerator() on a GPU");
}

/// Sizes or strides, outermost first. Prints as [2, 3].
class Shape {
 public:
  static constexpr std::size_t kMostDims = 8;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> sizes)
      : Shape(std::span<const std::int64_t>(sizes.begin(), sizes.size())) {}
  Shape(const std::vector<std::int64_t>& sizes) : Shape(std::span<const std::int64_t>(sizes)) {}
  /// Throws InvalidArgument above 8 dimensions.
  Shape(std::span<const std::int64_t> sizes) : count_(sizes.size()) {
    KVKEEP_REQUIRE(count_ <= kMostDims, "tensor: ", sizes.size(), " dimensions; allowed up to ", kMostDims);
    std::ranges::copy(sizes, sizes_.begin());
  }

  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::int64_t* begin() { return sizes_.data(); }
  [[nodiscard]] std::int64_t* end() { return sizes_.data() + count_; }
  [[nodiscard]] const std::int64_t* begin() const { return sizes_.data(); }
  [[nodiscard]] const std::int64_t* end() const { return sizes_.data() + count_; }
  [[nodiscard]] const std::int64_t* data() const { return sizes_.data(); }
  [[nodiscard]] std::int64_t& operator[](std::size_t i) { return sizes_[i]; }
  [[nodiscard]] std::int64_t operator[](std::size_t i) const { return sizes_[i]; }
  [[nodiscard]] std::int64_t product() const {
    std::int64_t all = 1;
    for (const std::int64_t size : *this) all *= size;
    return all;
  }
  /// Removes one dimension.
  void erase(std::size_t i) {
    std::copy(begin() + i + 1, end(), begin() + i);
    --count_;
  }
  friend bool operator==(const Shape& a, const Shape& b) { return std::ranges::equal(a, b); }
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << '[';
    for (std::size_t i = 0; i < shape.size(); ++i) out << (i > 0 ? ", " : "") << shape[i];
    return out << ']';
  }

 private:
  std::array<std::int64_t, kMostDims> sizes_{};
  std::size_t count_ = 0;
};

/// Shares ownership of whatever keeps memory alive. A copy increments a count and allocates nothing.
class Owner {
 public:
  struct Counting {
    void (*retain)(void*);
    void (*release)(void*);
  };

  Owner() = default;
  /// Takes over one reference to `held`.
  Owner(void* held, const Counting& counting) : held_(held), counting_(&counting) {}
  Owner(const Owner& other) : held_(other.held_), counting_(other.counting_) {
    if (held_ != nullptr) counting_->retain(held_);
  }
  Owner(Owner&& other) noexcept : held_(std::exchange(other.held_, nullptr)), counting_(other.counting_) {}
  Owner& operator=(Owner other) noexcept {
    std::swap(held_, other.held_);
    std::swap(counting_, other.counting_);
    return *this;
  }
  ~Owner() {
    if (held_ != nullptr) counting_->release(held_);
  }

  /// Owns any object.
  template <class T>
  [[nodiscard]] static Owner of(T object) {
    struct Box {
      T object;
      std::atomic<std::int64_t> count{1};
    };
    static constexpr Counting kCounting{
        [](void* box) { static_cast<Box*>(box)->count.fetch_add(1, std::memory_order_relaxed); },
        [](void* box) {
          if (static_cast<Box*>(box)->count.fetch_sub(1, std::memory_order_acq_rel) == 1) delete static_cast<Box*>(box);
        }};
    return {new Box{std::move(object)}, kCounting};
  }

 private:
  void* held_ = nullptr;
  const Counting* counting_ = nullptr;
};

/// Specialised by a backend for its own tensor type: `static Tensor view(const T&)` and `static T made_of(const
/// Tensor&)`, both sharing memory.
template <class T>
struct TensorBackend;

template <class T>
concept BackendTensor = requires { sizeof(TensorBackend<T>); };

/// An array of one dtype on one device. Copies are views of the same memory.
class Tensor {
 public:
  Tensor() = default;
  /// A view of `data`, which `owner` keeps alive (without one, the caller does). Strides are in elements.
  Tensor(void* data, Dtype dtype, const Shape& sizes, const Shape& strides, Device device = {}, Owner owner = {})
      : data_(static_cast<std::byte*>(data)),
        sizes_(sizes),
        strides_(strides),
        dtype_(dtype),
        device_(device),
        defined_(true),
        owner_(std::move(owner)) {}
  /// A contiguous view.
  Tensor(void* data, Dtype dtype, const Shape& sizes, Device device = {}, Owner owner = {})
      : Tensor(data, dtype, sizes, contiguous_strides(sizes), device, std::move(owner)) {}
  /// Shares the memory of a backend's tensor.
  template <BackendTensor T>
  Tensor(const T& other) : Tensor(TensorBackend<T>::view(other)) {}
  template <BackendTensor T>
  operator T() const {
    return TensorBackend<T>::made_of(*this);
  }

  /// True if its numbers have an address, or if it has none.
  [[nodiscard]] bool has_memory() const { return data_ != nullptr || std::ranges::find(sizes_, 0) != sizes_.end(); }
  /// False for an absent tensor.
  [[nodiscard]] bool defined() const { return defined_; }
  [[nodiscard]] const Shape& sizes() const { return sizes_; }
  [[nodiscard]] const Shape& strides() const { return strides_; }
  /// Negative dimensions count from the end.
  [[nodiscard]] std::int64_t size(std::int64_t d) const { return sizes_[at_dim(d)]; }
  [[nodiscard]] std::int64_t stride(std::int64_t d) const { return strides_[at_dim(d)]; }
  /// The stride that reaches an element: 0 along a dimension of one, whose own is never used.
  [[nodiscard]] std::int64_t step(std::int64_t d) const { return size(d) > 1 ? stride(d) : 0; }
  [[nodiscard]] std::int64_t dim() const { return static_cast<std::int64_t>(sizes_.size()); }
  [[nodiscard]] std::int64_t numel() const { return defined_ ? sizes_.product() : 0; }
  [[nodiscard]] Dtype dtype() const { return dtype_; }
  [[nodiscard]] const Device& device() const { return device_; }
  [[nodiscard]] std::int64_t element_size() const { return kvkeep::element_size(dtype_); }
  [[nodiscard]] std::int64_t nbytes() const { return numel() * element_size(); }
  [[nodiscard]] const Owner& owner() const { return owner_; }
  [[nodiscard]] bool is_contiguous() const {
    std::int64_t expected = 1;
    for (std::size_t d = sizes_.size(); d-- > 0;) {
      if (sizes_[d] != 1 && strides_[d] != expected) return numel() == 0;
      expected *= sizes_[d];
    }
    return true;
  }

  /// As in other pointer-like types, constness is that of the view, not of the data.
  [[nodiscard]] std::byte* bytes() const { return data_; }
  template <class T>
  [[nodiscard]] T* data() const {
    KVKEEP_REQUIRE(DtypeOf<T>::value == dtype_, "tensor: read as ", DtypeOf<T>::value, "; it holds ", dtype_);
    return reinterpret_cast<T*>(data_);
  }

  /// Views. `select` drops dimension d; `narrow` keeps `length` of it from `begin` on.
  [[nodiscard]] Tensor select(std::int64_t d, std::int64_t index) const {
    Tensor out = narrow(d, index, 1);
    out.sizes_.erase(at_dim(d)), out.strides_.erase(at_dim(d));
    return out;
  }
  [[nodiscard]] Tensor narrow(std::int64_t d, std::int64_t begin, std::int64_t length) const {
    const std::size_t at = at_dim(d);
    KVKEEP_REQUIRE(begin >= 0 && length >= 0 && begin + length <= sizes_[at], "tensor: range ", begin, " to ",
                   begin + length, " of dimension ", d, "; allowed up to ", sizes_[at]);
    Tensor out = *this;
    if (data_ != nullptr) out.data_ += begin * strides_[at] * element_size();
    out.sizes_[at] = length;
    return out;
  }
  [[nodiscard]] Tensor reshaped(const Shape& sizes) const {
    KVKEEP_REQUIRE(is_contiguous() && sizes.product() == numel(), "tensor: ", sizes_, " as ", sizes,
                   "; allowed a contiguous tensor with as many numbers");
    return {data_, dtype_, sizes, device_, owner_};
  }

 private:
  static Shape contiguous_strides(const Shape& sizes) {
    Shape strides = sizes;
    std::int64_t stride = 1;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      strides[d] = stride;
      stride *= std::max<std::int64_t>(sizes[d], 1);
    }
    return strides;
  }
  [[nodiscard]] std::size_t at_dim(std::int64_t d) const {
    const std::int64_t at = d < 0 ? d + dim() : d;
    KVKEEP_REQUIRE(at >= 0 && at < dim(), "tensor: dimension ", d, "; it has ", dim());
    return static_cast<std::size_t>(at);
  }

  std::byte* data_ = nullptr;
  Shape sizes_, strides_;
  Dtype dtype_ = Dtype::f32;
  Device device_ = {};
  bool defined_ = false;
  Owner owner_;
};

/// `what` are that many contiguous numbers, or more. `written`: they are there to be read. Throws InvalidArgument.
inline void require_flat(std::string_view what, const Tensor& given, Dtype dtype, std::int64_t count, Device device,
                         bool written = true) {
  const auto allowed = [&] { return text("; allowed a contiguous ", dtype, " [", count, "] on ", device.str()); };
  KVKEEP_REQUIRE(given.defined(), what, " are an absent tensor", allowed());
  KVKEEP_REQUIRE(given.has_memory() || !written, what, " have no address (null)", allowed());
  KVKEEP_REQUIRE(given.dtype() == dtype && given.dim() == 1 && given.size(0) >= count && given.is_contiguous() &&
                     given.device() == device,
                 what, " are ", given.dtype(), " ", given.sizes(), given.is_contiguous() ? "" : ", strided,", " on ",
                 given.device().str(), allowed());
}

/// Copies between two tensors of one shape and dtype, at least one of which is not on the CPU.
using DeviceCopy = void (*)(const Tensor& from, const Tensor& to);

namespace detail {

// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<DeviceCopy> device_copy{nullptr};

struct FreeAligned {
  void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
};

/// Calls f(a, b) with the addresses of every pair of numbers of two arrays of one shape, outermost dimension first.
template <class F>
void each_pair(const Shape& sizes, std::byte* a, const Shape& a_strides, std::int64_t a_bytes, std::byte* b,
               const Shape& b_strides, std::int64_t b_bytes, std::size_t d, const F& f) {
  if (d == sizes.size()) return f(a, b);
  for (std::int64_t i = 0; i < sizes[d]; ++i)
    each_pair(sizes, a + i * a_strides[d] * a_bytes, a_strides, a_bytes, b + i * b_strides[d] * b_bytes, b_strides,
              b_bytes, d + 1, f);
}

}  // namespace detail

/// From now on copy() uses it for tensors that are not on the CPU; null: copy() refuses them. Returns the one used
/// before.
inline DeviceCopy use_device_copy(DeviceCopy copy) {
  return detail::device_copy.exchange(copy, std::memory_order_acq_rel);
}

/// A contiguous, uninitialised tensor on the CPU, aligned to 64 bytes. Throws InvalidArgument for a negative size, and
/// for more than 2^63 - 1 bytes.
[[nodiscard]] inline Tensor empty(const Shape& sizes, Dtype dtype) {
  std::int64_t numbers = 1, needed = 0;
  bool fits = true, none = false;
  for (const std::int64_t size : sizes) {  // strides are made from the sizes that are not 0
    fits = fits && size >= 0 && !__builtin_mul_overflow(numbers, std::max<std::int64_t>(size, 1), &numbers);
    none = none || size == 0;
  }
  fits = fits && (none || !__builtin_mul_overflow(numbers, element_size(dtype), &needed));
  KVKEEP_REQUIRE(fits, "tensor: sizes ", sizes, " of ", dtype,
                 "; allowed sizes of 0 or more, and fewer than 2^63 bytes");
  const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(needed, 1));
  std::unique_ptr<std::byte, detail::FreeAligned> memory(
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
  std::byte* data = memory.get();
  return {data, dtype, sizes, Device{}, Owner::of(std::move(memory))};
}

[[nodiscard]] inline Tensor zeros(const Shape& sizes, Dtype dtype) {
  Tensor out = empty(sizes, dtype);
  std::memset(out.bytes(), 0, static_cast<std::size_t>(out.nbytes()));
  return out;
}

template <class T>
[[nodiscard]] Tensor full(const Shape& sizes, T value) {
  Tensor out = empty(sizes, DtypeOf<T>::value);
  std::fill_n(out.template data<T>(), out.numel(), value);
  return out;
}

/// Copies between tensors of one shape and dtype. They must not overlap. Off the CPU a backend does it (kvkeep/torch.h:
/// on the current stream). Throws InvalidArgument if shape or dtype differ, or without a backend.
inline void copy(const Tensor& from, const Tensor& to) {
  const DeviceCopy device_copy = detail::device_copy.load(std::memory_order_acquire);
  const bool on_cpu = from.device().is_cpu() && to.device().is_cpu();
  KVKEEP_REQUIRE(from.sizes() == to.sizes() && from.dtype() == to.dtype() && (on_cpu || device_copy != nullptr),
                 "copy: ", from.sizes(), " ", from.dtype(), " on ", from.device().str(), " to ", to.sizes(), " ",
                 to.dtype(), " on ", to.device().str(),
                 "; allowed one shape and dtype, on the CPU or with a backend (kvkeep/torch.h)");
  if (from.numel() == 0) return;
  if (!on_cpu) return device_copy(from, to);
  if (from.is_contiguous() && to.is_contiguous()) {
    std::memcpy(to.bytes(), from.bytes(), static_cast<std::size_t>(from.nbytes()));
    return;
  }
  const std::int64_t bytes = from.element_size();
  detail::each_pair(from.sizes(), to.bytes(), to.strides(), bytes, from.bytes(), from.strides(), bytes, 0,
                    [&](std::byte* t, const std::byte* f) { std::memcpy(t, f, static_cast<std::size_t>(bytes)); });
}

/// A contiguous copy, on the CPU.
[[nodiscard]] inline Tensor clone(const Tensor& t) {
  Tensor out = empty(t.sizes(), t.dtype());
  copy(t, out);
  return out;
}

/// The tensor itself if it is contiguous, else a copy.
[[nodiscard]] inline Tensor contiguous(const Tensor& t) { return t.is_contiguous() ? t : clone(t); }

/// Contiguous copies of the entries `places` of dimension d, in that order.
[[nodiscard]] inline Tensor gather(const Tensor& t, std::int64_t d, std::span<const std::int32_t> places) {
  Shape sizes = t.sizes();
  sizes[static_cast<std::size_t>(d)] = static_cast<std::int64_t>(places.size());
  Tensor out = empty(sizes, t.dtype());
  for (std::size_t i = 0; i < places.size(); ++i)
    copy(t.select(d, places[i]), out.select(d, static_cast<std::int64_t>(i)));
  return out;
}

/// Calls `body(T{})` with the C++ type of a dtype that can be scored.
template <class Body>
decltype(auto) with_dtype(const char* operation, Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::f32:
      return body(float{});
    case Dtype::f16:
      return body(Half{});
    case Dtype::bf16:
      return body(BFloat16{});
    default:
      refuse(operation, ": dtype ", dtype, " cannot be scored; allowed: f32, f16, bf16");
  }
}

/// The numbers of a CPU tensor as contiguous T, converted if they are of another type: f32, f16, bf16, f64, i64, i32 or
/// u8. The tensor itself if there is nothing to do.
template <class T>
[[nodiscard]] Tensor as(const Tensor& t) {
  if (t.dtype() == DtypeOf<T>::value) return contiguous(t);
  Tensor out = empty(t.sizes(), DtypeOf<T>::value);
  const auto convert = [&]<class From>(From) {
    detail::each_pair(t.sizes(), out.bytes(), out.strides(), out.element_size(), t.bytes(), t.strides(),
                      t.element_size(), 0, [](std::byte* to, const std::byte* from) {
                        if constexpr (std::is_arithmetic_v<From>)
                          *reinterpret_cast<T*>(to) = static_cast<T>(*reinterpret_cast<const From*>(from));
                        else
                          *reinterpret_cast<T*>(to) =
                              static_cast<T>(static_cast<float>(*reinterpret_cast<const From*>(from)));
                      });
  };
  if (t.numel() == 0) return out;
  switch (t.dtype()) {
    case Dtype::f32:
      convert(float{});
      break;
    case Dtype::f16:
      convert(Half{});
      break;
    case Dtype::bf16:
      convert(BFloat16{});
      break;
    case Dtype::f64:
      convert(double{});
      break;
    case Dtype::i64:
      convert(std::int64_t{});
      break;
    case Dtype::i32:
      convert(std::int32_t{});
      break;
    case Dtype::u8:
      convert(std::uint8_t{});
      break;
    default:
      refuse("tensor: ", t.dtype(), " as ", DtypeOf<T>::value, "; allowed f32, f16, bf16, f64, i64, i32, u8");
  }
  return out;
}

namespace detail {

/// Whether no number without its sign bit, read as an integer, is above `limit`. Integers order as the floating-point
/// numbers do, with infinity and NaN at the top. Signed, because vector units compare signed integers.
template <class Bits>
[[nodiscard]] bool none_above(const std::byte* data, std::int64_t count, Bits limit) {
  Bits above = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
    above = static_cast<Bits>(above | ((bits & std::numeric_limits<Bits>::max()) > limit ? 1 : 0));
  }
  return above == 0;
}

}  // namespace detail

/// Largest magnitude of a query that scorers accept: the difference of two such numbers still fits f32.
inline constexpr float kLargestQuery = 1e38F;

/// True if no number is NaN or infinite or, in f32 and bf16, beyond `kLargestQuery`. data: f32, f16 or bf16 [count],
/// any alignment. Cost: one read.
[[nodiscard]] inline bool all_finite(const std::byte* data, Dtype dtype, std::int64_t count) {
  constexpr auto kLargest = std::bit_cast<std::int32_t>(kLargestQuery);
  if (dtype == Dtype::f32) return detail::none_above<std::int32_t>(data, count, kLargest);
  return detail::none_above<std::int16_t>(
      data, count, dtype == Dtype::bf16 ? static_cast<std::int16_t>(kLargest >> 16) : std::int16_t{0x7BFF});
}

/// True if no number of a CPU tensor (f32, f16, bf16 or f64) is NaN or infinite.
[[nodiscard]] inline bool all_finite(const Tensor& t) {
  const Tensor wide = as<double>(t);
  const std::span<const double> numbers(wide.data<double>(), static_cast<std::size_t>(wide.numel()));
  return std::ranges::all_of(numbers, [](double x) { return std::isfinite(x); });
}

/// Memory of one GPU, and the stream that work goes to: an engine's own, LibTorch's (torch_resources(),
/// kvkeep/torch.h), or a pool (cuda::pool_resources(), kvkeep/cuda.h). Streams are cudaStream_t; null is the default
/// stream. Called from the threads that call the keeper, one at a time; memory may be given back after the keeper.
class DeviceResources {
 public:
  DeviceResources() = default;
  DeviceResources(const DeviceResources&) = delete;
  DeviceResources& operator=(const DeviceResources&) = delete;
  virtual ~DeviceResources() = default;

  /// Where work goes that is launched now.
  [[nodiscard]] virtual void* stream() = 0;

  /// `bytes` (64 or more) on the GPU, aligned to 256, for work that comes later on `stream`. Throws if there are none.
  [[nodiscard]] virtual void* allocate(std::int64_t bytes, void* stream) = 0;

  /// Takes it back from the same stream: work that was launched on it before may still use it. The stream is not being
  /// captured.
  virtual void free(void* memory, std::int64_t bytes, void* stream) noexcept = 0;
};

/// The resources of accelerators that are made without any.
using MakeDeviceResources = std::shared_ptr<DeviceResources> (*)(const Device& device);

namespace detail {
// One in the whole process, whatever a consumer hides.
[[gnu::visibility("default")]] inline std::atomic<MakeDeviceResources> device_resources{nullptr};
}  // namespace detail

/// From now on accelerators that are given no resources use these; null: pools of their own. Returns what was used
/// before.
inline MakeDeviceResources use_device_resources(MakeDeviceResources make) {
  return detail::device_resources.exchange(make, std::memory_order_acq_rel);
}

}  // namespace kvkeep
