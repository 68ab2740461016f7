// The cost of having a factor near: from the disk, beside a memcpy of the same bytes in the same run, and if it is near
// already.
//
//   kvkeep_bench --benchmark_filter=FarStore
//
// FarStore/Put/<where>/<bytes of a blob> and FarStore/Reload/disk/<bytes>: GB/s of one thread over 128 MiB of blobs,
// medians of the iterations. `put` is FarStore::put into a file or into memory, `get` FactorCache::get that finds
// nothing near, `copy` a memcpy of each blob between blocks of memory that already exist, `share` their rate over that
// of `copy`. A file of 128 MiB stays in the system's page cache: this times the way from there, not the disk. `check`
// is the checksum alone. FarStore/Near: ns of a get() when everything is near, by threads that ask at the same time for
// blobs in host memory, without a limit and with one.

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "kvkeep/memory/factor_cache.h"
#include "timing.h"

namespace kvkeep::far_store_bench {
namespace {

constexpr std::size_t kAll = std::size_t{128} << 20;

std::vector<std::byte> random_bytes() {
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> words(kAll / 8);
  for (std::uint64_t& word : words) word = random();
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  return {bytes, bytes + kAll};
}

FarStoreOptions options_of(bool disk) {
  FarStoreOptions options;
  if (disk)
    options.host_bytes = 0,
    options.file = std::filesystem::temp_directory_path() / text("kvkeep_far_store_bench_", ::getpid());
  return options;
}

double gigabytes_a_second(std::size_t bytes, const std::vector<double>& ms) {
  return static_cast<double>(bytes) / median(ms) / 1e6;
}

struct Bytes {
  explicit Bytes(std::size_t bytes_each) : each(bytes_each), count(kAll / bytes_each), from(random_bytes()), to(kAll) {}

  [[nodiscard]] std::span<const std::byte> blob(std::size_t i) const { return {from.data() + i * each, each}; }
  [[nodiscard]] double copy() {
    return milliseconds([&] {
      for (std::size_t i = 0; i < count; ++i) std::memcpy(to.data() + i * each, from.data() + i * each, each);
      benchmark::ClobberMemory();
    });
  }

  std::size_t each, count;
  std::vector<std::byte> from, to;
};

void Put(benchmark::State& state, bool disk) {
  Bytes bytes(static_cast<std::size_t>(state.range(0)));
  std::vector<double> put, copy, check;
  for (auto _ : state) {
    const auto store = FarStore::make(options_of(disk));
    std::vector<FarBlobPtr> blobs(bytes.count);
    put.push_back(milliseconds([&] {
      for (std::size_t i = 0; i < bytes.count; ++i) blobs[i] = store->put(bytes.blob(i));
    }));
    state.SetIterationTime(put.back() / 1e3);
    copy.push_back(bytes.copy());
    check.push_back(milliseconds([&] {
      for (std::size_t i = 0; i < bytes.count; ++i) benchmark::DoNotOptimize(checksum(bytes.blob(i)));
    }));
  }
  const std::size_t all = bytes.count * bytes.each;
  state.counters["put_GB/s"] = gigabytes_a_second(all, put);
  state.counters["copy_GB/s"] = gigabytes_a_second(all, copy);
  state.counters["check_GB/s"] = gigabytes_a_second(all, check);
  state.counters["share"] = median(copy) / median(put);
}

void Reload(benchmark::State& state) {
  Bytes bytes(static_cast<std::size_t>(state.range(0)));
  const auto store = FarStore::make(options_of(true));
  std::vector<FarBlobPtr> blobs(bytes.count);
  for (std::size_t i = 0; i < bytes.count; ++i) blobs[i] = store->put(bytes.blob(i));
  FactorCache cache({.bytes = 8 << 20, .background = false});  // each is long gone when it is asked for again
  for (std::size_t i = 0; i < bytes.count; ++i)
    if (std::memcmp(cache.get(blobs[i]).get(), bytes.blob(i).data(), bytes.each) != 0)
      return state.SkipWithError("reads wrong bytes");
  std::vector<double> get, copy;
  for (auto _ : state) {
    get.push_back(milliseconds([&] {
      for (const FarBlobPtr& blob : blobs) benchmark::DoNotOptimize(cache.get(blob).get());
    }));
    state.SetIterationTime(get.back() / 1e3);
    copy.push_back(bytes.copy());
  }
  if (cache.totals().hits > 0) return state.SkipWithError("something was near");
  const std::size_t all = bytes.count * bytes.each;
  state.counters["get_GB/s"] = gigabytes_a_second(all, get);
  state.counters["copy_GB/s"] = gigabytes_a_second(all, copy);
  state.counters["share"] = median(copy) / median(get);
}

void Near(benchmark::State& state, std::int64_t budget) {
  constexpr std::size_t kBlobs = 20000, kGets = 1 << 18;
  const auto threads = static_cast<std::size_t>(state.range(0));
  const auto store = FarStore::make();
  const std::vector<std::byte> bytes(512);
  std::vector<FarBlobPtr> blobs(kBlobs);
  FactorCache cache({.bytes = budget});
  for (FarBlobPtr& blob : blobs) {
    blob = store->put(bytes);
    benchmark::DoNotOptimize(cache.get(blob).get());
  }
  std::vector<double> ms;
  for (auto _ : state) {
    ms.push_back(milliseconds([&] {
      std::vector<std::thread> asking;
      for (std::size_t t = 0; t < threads; ++t)
        asking.emplace_back([&, t] {
          for (std::size_t i = 0; i < kGets; ++i)
            benchmark::DoNotOptimize(cache.get(blobs[(t * 7919 + i) % kBlobs]).get());
        });
      for (std::thread& thread : asking) thread.join();
    }));
    state.SetIterationTime(ms.back() / 1e3);
  }
  if (cache.totals().misses != kBlobs) return state.SkipWithError("something was not near");
  state.counters["get_ns"] = median(ms) * 1e6 / static_cast<double>(kGets);
}

void blob_sizes(benchmark::internal::Benchmark* b) {
  for (const std::int64_t bytes : {4 << 10, 37 << 10, 1 << 20}) b->Arg(bytes);
  b->UseManualTime()->MinTime(2)->Unit(benchmark::kMillisecond);
}

void thread_counts(benchmark::internal::Benchmark* b) {
  b->ArgName("threads")->Arg(1)->Arg(2)->Arg(4)->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(Put, host, false)->Name("FarStore/Put/host")->Apply(blob_sizes);
BENCHMARK_CAPTURE(Put, disk, true)->Name("FarStore/Put/disk")->Apply(blob_sizes);
BENCHMARK(Reload)->Name("FarStore/Reload/disk")->Apply(blob_sizes);
BENCHMARK_CAPTURE(Near, unlimited, FactorCacheOptions::kUnlimited)
    ->Name("FarStore/Near/unlimited")
    ->Apply(thread_counts);
BENCHMARK_CAPTURE(Near, limited, std::int64_t{1} << 40)->Name("FarStore/Near/limited")->Apply(thread_counts);

}  // namespace
}  // namespace kvkeep::far_store_bench
