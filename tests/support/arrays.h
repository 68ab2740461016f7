// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Arrays of numbers for tests: kvkeep's tensors with the little arithmetic that tests need.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kvkeep/core/tensor.h"
#include "oracle/random_case.h"

namespace kvkeep::testing {

/// What programs that test a device add (tests/cuda/arrays_on_device.cpp): memory there, and numbers of f8.
inline Tensor (*empty_on_device)(const Shape& sizes, Dtype dtype, Device device) = nullptr;
inline Tensor (*convert_f8)(const Tensor& from, Dtype dtype) = nullptr;

/// Calls body(T{}) with the C++ type of a dtype.
template <class Body>
decltype(auto) with_number(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f32:
      return body(float{});
    case Dtype::f16:
      return body(Half{});
    case Dtype::bf16:
      return body(BFloat16{});
    case Dtype::f64:
      return body(double{});
    case Dtype::i64:
      return body(std::int64_t{});
    case Dtype::i32:
      return body(std::int32_t{});
    case Dtype::i16:
      return body(std::int16_t{});
    case Dtype::i8:
      return body(std::int8_t{});
    default:
      KVKEEP_REQUIRE(dtype == Dtype::u8, "array: ", dtype, " has no C++ type here");
      return body(std::uint8_t{});
  }
}

/// A view that shares its memory, as Tensor is. Negative dimensions count from the end.
class Array : public Tensor {
 public:
  using Tensor::Tensor;
  Array() = default;
  Array(const Tensor& t) : Tensor(t) {}
  Array(const Array&) = default;
  Array(Array&&) = default;
  Array& operator=(const Array&) & = default;  // `a[1] = b` would change no number: a[1].copy_(b) does
  Array& operator=(Array&&) & = default;
  ~Array() = default;

  [[nodiscard]] static Array empty(const Shape& sizes, Dtype dtype = Dtype::f32, Device device = {}) {
    if (device.is_cpu()) return kvkeep::empty(sizes, dtype);
    KVKEEP_REQUIRE(empty_on_device != nullptr, "array: on ", device.str(), "; this program tests no device");
    return empty_on_device(sizes, dtype, device);
  }
  [[nodiscard]] static Array full(const Shape& sizes, double value, Dtype dtype = Dtype::f32, Device device = {}) {
    const Array all = empty(sizes, dtype, device);
    all.fill_(value);
    return all;
  }
  [[nodiscard]] static Array zeros(const Shape& sizes, Dtype dtype = Dtype::f32) { return kvkeep::zeros(sizes, dtype); }
  /// First to last - 1.
  [[nodiscard]] static Array range(std::int64_t first, std::int64_t last, Dtype dtype = Dtype::f32) {
    const Array all = empty({last - first}, Dtype::i64);
    for (std::int64_t i = first; i < last; ++i) all.data<std::int64_t>()[i - first] = i;
    return all.to(dtype);
  }
  /// These numbers, in one dimension.
  template <class T>
  [[nodiscard]] static Array of(const std::vector<T>& numbers) {
    const Array all = empty({std::ssize(numbers)}, DtypeOf<T>::value);
    std::copy(numbers.begin(), numbers.end(), all.data<T>());
    return all;
  }
  [[nodiscard]] static Array of(std::initializer_list<float> numbers) { return of(std::vector<float>(numbers)); }
  /// One behind the other along dimension d.
  [[nodiscard]] static Array cat(const std::vector<Array>& parts, std::int64_t d = 0) {
    Shape sizes = parts.front().sizes();
    std::int64_t& along = sizes[static_cast<std::size_t>(d)] = 0;
    for (const Array& part : parts) along += part.size(d);
    const Array all = empty(sizes, parts.front().dtype(), parts.front().device());
    std::int64_t begin = 0;
    for (const Array& part : parts) {
      all.narrow(d, begin, part.size(d)).copy_(part);
      begin += part.size(d);
    }
    return all;
  }
  /// The same along a dimension of their own, the first.
  [[nodiscard]] static Array stack(std::vector<Array> parts) {
    for (Array& part : parts) part = part.unsqueeze(0);
    return cat(parts);
  }

  [[nodiscard]] Array operator[](std::int64_t i) const { return select(0, i); }
  [[nodiscard]] Array select(std::int64_t d, std::int64_t i) const {
    return Tensor::select(d, i < 0 ? i + size(d) : i);
  }
  [[nodiscard]] Array narrow(std::int64_t d, std::int64_t begin, std::int64_t length) const {
    return Tensor::narrow(d, begin, length);
  }
  /// Dimension d of the result is dimension order[d] of this.
  [[nodiscard]] Array permute(const std::vector<std::int64_t>& order) const {
    Shape those = sizes(), steps = strides();
    for (std::size_t d = 0; d < order.size(); ++d) those[d] = size(order[d]), steps[d] = stride(order[d]);
    return {bytes(), dtype(), those, steps, device(), owner()};
  }
  [[nodiscard]] Array unsqueeze(std::int64_t d) const {
    std::vector<std::int64_t> those(sizes().begin(), sizes().end()), steps(strides().begin(), strides().end());
    those.insert(those.begin() + d, 1);
    steps.insert(steps.begin() + d, d < dim() ? size(d) * stride(d) : 1);
    return {bytes(), dtype(), Shape(those), Shape(steps), device(), owner()};
  }
  [[nodiscard]] Array reshape(const Shape& those) const { return contiguous().reshaped(those); }

  [[nodiscard]] Array clone() const {
    const Array all = empty(sizes(), dtype(), device());
    copy(*this, all);
    return all;
  }
  [[nodiscard]] Array contiguous() const { return is_contiguous() ? *this : clone(); }
  [[nodiscard]] Array to(Device there) const {
    if (there == device()) return *this;
    const Array all = empty(sizes(), dtype(), there);
    copy(contiguous(), all);
    return all;
  }
  /// Of the CPU.
  [[nodiscard]] Array to(Dtype other) const {
    if (other == dtype()) return *this;
    for (const Dtype f8 : {Dtype::f8_e4m3, Dtype::f8_e5m2})
      if ((dtype() == f8 || other == f8) && convert_f8 != nullptr) return convert_f8(*this, other);
    const Array all = empty(sizes(), other);
    if (numel() > 0)
      with_number(dtype(), [&]<class From>(From) {
        with_number(other, [&]<class To>(To) {
          detail::each_pair(sizes(), all.bytes(), all.strides(), all.element_size(), bytes(), strides(), element_size(),
                            0, [](std::byte* to, const std::byte* from) {
                              const From& number = *reinterpret_cast<const From*>(from);
                              if constexpr (std::is_arithmetic_v<From> && std::is_arithmetic_v<To>)
                                *reinterpret_cast<To*>(to) = static_cast<To>(number);
                              else
                                *reinterpret_cast<To*>(to) = static_cast<To>(static_cast<float>(number));
                            });
        });
      });
    return all;
  }

  /// Takes over the numbers of `from`, in this dtype, wherever both are.
  void copy_(const Array& from) const { copy(from.dtype() == dtype() ? from : from.to(Device{}).to(dtype()), *this); }
  void fill_(double value) const {
    if (!device().is_cpu()) return copy_(full(sizes(), value, dtype()));
    if (numel() > 0)
      each<std::byte>([&, one = full_one(value)](std::byte* at) {
        std::memcpy(at, one.bytes(), static_cast<std::size_t>(element_size()));
      });
  }
  /// Of f32: each number times `factor`; itself.
  const Array& mul_(double factor) const {
    KVKEEP_REQUIRE(dtype() == Dtype::f32, "array: ", dtype(), " times a number; allowed f32");
    if (numel() > 0) each<float>([factor](float* x) { *x = static_cast<float>(static_cast<double>(*x) * factor); });
    return *this;
  }

  /// The only number.
  template <class T = float>
  [[nodiscard]] T item() const {
    KVKEEP_REQUIRE(numel() == 1, "array: one number of ", sizes());
    return *data<T>();
  }
  /// Same shape, dtype and bits.
  [[nodiscard]] bool equal(const Array& other) const {
    if (sizes() != other.sizes() || dtype() != other.dtype()) return false;
    const Array a = to(Device{}).contiguous(), b = other.to(Device{}).contiguous();
    return numel() == 0 || std::memcmp(a.bytes(), b.bytes(), static_cast<std::size_t>(nbytes())) == 0;
  }

 private:
  [[nodiscard]] Array full_one(double value) const {
    const Array one = empty({1}, Dtype::f64);
    *one.data<double>() = value;
    return one.to(dtype());
  }
  template <class T, class Body>
  void each(const Body& body) const {
    detail::each_pair(sizes(), bytes(), strides(), element_size(), bytes(), strides(), element_size(), 0,
                      [&](std::byte* at, const std::byte*) { body(reinterpret_cast<T*>(at)); });
  }
};

/// Standard normal numbers times `scale`.
inline Array normals(oracle::Random& random, const Shape& sizes, double scale = 1) {
  const Array all = Array::empty(sizes);
  for (std::int64_t i = 0; i < all.numel(); ++i) all.data<float>()[i] = static_cast<float>(scale * random.normal());
  return all;
}
/// The same numbers for the same seed.
inline Array normals(std::uint64_t seed, const Shape& sizes) {
  oracle::Random random(seed);
  return normals(random, sizes);
}

/// Whole numbers from 0 to `below` - 1.
inline Array whole_numbers(oracle::Random& random, int below, const Shape& sizes, Dtype dtype = Dtype::f32) {
  const Array all = Array::empty(sizes, Dtype::i32);
  for (std::int64_t i = 0; i < all.numel(); ++i) all.data<std::int32_t>()[i] = random.between(0, below - 1);
  return all.to(dtype);
}

/// Largest difference of two arrays, infinite if their shapes differ.
inline double apart(const Array& a, const Array& b) {
  if (a.sizes() != b.sizes()) return HUGE_VAL;
  double most = 0;
  const Array x = a.to(Dtype::f64).contiguous(), y = b.to(Dtype::f64).contiguous();
  for (std::int64_t i = 0; i < x.numel(); ++i)
    most = std::max(most, std::abs(x.data<double>()[i] - y.data<double>()[i]));
  return most;
}

}  // namespace kvkeep::testing
