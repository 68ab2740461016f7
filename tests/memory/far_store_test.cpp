// Bytes come back as they were put or not at all; caps hold at every moment; what is dropped is given back.

#include "kvkeep/memory/far_store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "far_blobs.h"

namespace kvkeep::far_store_test {
namespace {

using namespace testing;
namespace fs = std::filesystem;

const std::vector<std::size_t> kSizes{1,       63,           64, 65, 997, 4096, 4097, 37 << 10, 1 << 18, (1 << 18) + 1,
                                      1 << 20, (3 << 20) + 1};
constexpr FarLabel kLabel{.sequence = 3, .layer = 2, .head = 0, .span = 17, .begin = 210, .end = 274};
constexpr std::int64_t kFirstLine = 64;

void write_at(const fs::path& file, std::int64_t offset, char byte) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(offset).put(byte);
  ASSERT_TRUE(stream.good());
}

char read_at(const fs::path& file, std::int64_t offset) {
  std::ifstream stream(file, std::ios::binary);
  return static_cast<char>(stream.seekg(offset).get());
}

TEST(FarStore, GivesBackTheBytesThatWerePut) {
  const SpillFolder folder;
  for (const bool disk : {false, true}) {
    FarStoreOptions options;
    if (disk) options.host_bytes = 0, options.file = folder.file();
    const auto store = FarStore::make(options);
    std::vector<FarBlobPtr> blobs;
    std::int64_t rounded = 0;
    for (const std::size_t size : kSizes) {
      blobs.push_back(store->put(random_bytes(size, size), kLabel));
      rounded += (static_cast<std::int64_t>(size) + 63) / 64 * 64;
    }
    for (std::size_t i = 0; i < blobs.size(); ++i) {
      const Data expected = random_bytes(kSizes[i], kSizes[i]);
      EXPECT_EQ(blobs[i]->size(), static_cast<std::int64_t>(kSizes[i]));
      EXPECT_EQ(read(*blobs[i]), expected);
      EXPECT_EQ(blobs[i]->checksum(), checksum(expected));
      EXPECT_EQ(blobs[i]->on_disk(), disk);
      EXPECT_EQ(blobs[i]->in_host() == nullptr, disk);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blobs[i]->in_host()) % 64, 0U);
      if (!disk) EXPECT_EQ(std::memcmp(blobs[i]->in_host(), expected.data(), expected.size()), 0);
    }
    EXPECT_EQ(disk ? store->file_bytes() : store->host_bytes(), rounded);
    EXPECT_EQ(disk ? store->host_bytes() : store->file_bytes(), 0);
    EXPECT_EQ(store->blobs(), static_cast<std::int64_t>(kSizes.size()));
  }
}

TEST(FarStore, TakesABlobOfNoBytesWhereThereIsNoRoom) {
  const auto store = FarStore::make({.host_bytes = 0});
  const FarBlobPtr blob = store->put({});
  EXPECT_EQ(blob->size(), 0);
  EXPECT_FALSE(blob->on_disk());
  EXPECT_NE(blob->in_host(), nullptr);
  blob->read(nullptr);
  EXPECT_EQ(store->host_bytes() + store->slab_bytes(), 0);
  EXPECT_EQ(store->blobs(), 1);
}

TEST(FarStore, NeverGivesAnIdTwice) {
  const auto one = FarStore::make(), two = FarStore::make();
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 500; ++i) {
    ids.insert(one->put(random_bytes(1, 10))->id());
    ids.insert(two->put({})->id());
  }
  EXPECT_EQ(ids.size(), 1000U);
  EXPECT_FALSE(ids.contains(0));
}

TEST(FarStore, RefusesABlobThatDoesNotFitAndKeepsWhatItHas) {
  for (const std::int64_t cap : {std::int64_t{4096}, std::int64_t{4096 + 63}}) {
    const auto store = FarStore::make({.host_bytes = cap});
    std::vector<FarBlobPtr> blobs;
    for (std::uint64_t i = 0; i < 64; ++i) blobs.push_back(store->put(random_bytes(i, 50)));
    EXPECT_EQ(store->host_bytes(), 4096) << "50 bytes take 64";
    const std::string message = message_of<StateError>([&] { (void)store->put(random_bytes(9, 33), kLabel); });
    expect_says(message, {"far store: no room for span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0",
                          "given 33 bytes", text(cap - 4096, " of ", cap, " bytes free"), "there is no file"});
    EXPECT_EQ(store->host_bytes(), 4096);
    EXPECT_EQ(store->host_peak_bytes(), 4096);
    EXPECT_EQ(store->blobs(), 64);
    blobs.erase(blobs.begin() + 20, blobs.begin() + 22);
    blobs.push_back(store->put(random_bytes(100, 128)));
    EXPECT_EQ(read(*blobs.back()), random_bytes(100, 128)) << "the room of two that were dropped";
    for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(read(*blobs[i]), random_bytes(i, 50));
    EXPECT_THROW((void)store->put(random_bytes(9, 1)), StateError);
    blobs.clear();
    EXPECT_EQ(store->host_bytes(), 0);
    EXPECT_EQ(store->slab_bytes(), 0);
  }
}

TEST(FarStore, PutsIntoTheFileWhatHostMemoryHasNoRoomFor) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 8192, .file = folder.file(), .file_bytes = 4096});
  std::vector<FarBlobPtr> blobs;
  for (std::uint64_t i = 0; i < 12; ++i) blobs.push_back(store->put(random_bytes(i, 1000), kLabel));
  for (std::uint64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(blobs[i]->on_disk(), i >= 8);
    EXPECT_EQ(read(*blobs[i]), random_bytes(i, 1000));
  }
  const std::string message = message_of<StateError>([&] { (void)store->put(random_bytes(9, 1000), kLabel); });
  expect_says(message, {"given 1000 bytes", "host memory has 0 of 8192 bytes free",
                        "'" + folder.file().string() + "' has 0 of 4096 bytes free", "span 17"});
  EXPECT_EQ(store->host_bytes(), 8192);
  EXPECT_EQ(store->file_bytes(), 4096);
  blobs[3] = nullptr;
  EXPECT_FALSE(store->put(random_bytes(9, 1000))->on_disk()) << "memory first, as soon as it has room";
  blobs[9] = nullptr;
  const FarBlobPtr first = store->put(random_bytes(20, 1000)), second = store->put(random_bytes(21, 1024));
  EXPECT_FALSE(first->on_disk());
  EXPECT_TRUE(second->on_disk());
  EXPECT_EQ(read(*second), random_bytes(21, 1024));
}

TEST(FarStore, RefusesInTheWordsOfAFileAlone) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file(), .file_bytes = 100});
  const FarBlobPtr blob = store->put(random_bytes(1, 64));
  expect_says(message_of<StateError>([&] { (void)store->put(random_bytes(2, 1)); }),
              {"a blob", "0 of 0 bytes free", "36 of 100 bytes free, at most 0 in one piece"});
  EXPECT_EQ(read(*blob), random_bytes(1, 64));
}

/// Memory as an accelerator would give it, counted.
struct CountedSlabs {
  std::map<std::byte*, std::int64_t> slabs;
  std::int64_t bytes = 0, peak = 0, calls = 0;

  FarStoreOptions options() {
    FarStoreOptions o;
    o.allocate = [this](std::int64_t size) {
      auto* at = static_cast<std::byte*>(::operator new(static_cast<std::size_t>(size), std::align_val_t{64}));
      slabs[at] = size, bytes += size, peak = std::max(peak, bytes), ++calls;
      return at;
    };
    o.release = [this](std::byte* at, std::int64_t size) {
      EXPECT_EQ(slabs.at(at), size) << "once each, as it was allocated";
      slabs.erase(at), bytes -= size;
      ::operator delete(at, std::align_val_t{64});
    };
    return o;
  }
};

TEST(FarStore, NeverTakesMoreFromTheSystemThanItsCapAndGivesAllOfItBack) {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    CountedSlabs slabs;
    FarStoreOptions options = slabs.options();
    options.host_bytes = 40000 + static_cast<std::int64_t>(random() % 100000);
    options.slab_bytes = 4096 << (seed % 3);
    std::vector<std::pair<FarBlobPtr, std::uint64_t>> held;
    std::int64_t refused = 0, rounded = 0;
    {
      const auto store = FarStore::make(options);
      for (std::uint64_t i = 0; i < 3000; ++i) {
        for (std::size_t leave = i % 600 < 400 ? random() % 2 : 3; leave > 0 && !held.empty();
             --leave) {  // crowds, and ebbs in which slabs empty
          const auto drop = held.begin() + static_cast<std::ptrdiff_t>(random() % held.size());
          rounded -= (drop->first->size() + 63) / 64 * 64;
          held.erase(drop);
        }
        const std::size_t size = random() % 10 == 0 ? random() % 20000 : random() % 900;
        try {
          held.emplace_back(store->put(random_bytes(i, size)), i);
          rounded += (static_cast<std::int64_t>(size) + 63) / 64 * 64;
        } catch (const StateError&) {
          ++refused;
        }
        ASSERT_EQ(store->host_bytes(), rounded);
        ASSERT_EQ(store->slab_bytes(), slabs.bytes);
        ASSERT_LE(store->host_bytes(), store->slab_bytes());
        ASSERT_LE(slabs.bytes, options.host_bytes);
        ASSERT_EQ(store->blobs(), static_cast<std::int64_t>(held.size()));
      }
      EXPECT_EQ(store->slab_peak_bytes(), slabs.peak);
      for (const auto& [blob, i] : held)
        ASSERT_EQ(read(*blob), random_bytes(i, static_cast<std::size_t>(blob->size())));
    }
    EXPECT_GT(refused, 0) << "the cap was met";
    EXPECT_GT(slabs.calls, 20) << "slabs came and went";
    held.clear();
    EXPECT_EQ(slabs.bytes, 0);
    EXPECT_TRUE(slabs.slabs.empty());
  }
}

TEST(FarStore, StaysFlatWhileTenThousandOwnersComeAndGo) {
  const SpillFolder folder;
  std::mt19937_64 random(7);
  const auto store = FarStore::make({.host_bytes = 2 << 20, .file = folder.file(), .slab_bytes = 1 << 16});
  std::deque<std::vector<std::pair<FarBlobPtr, std::uint64_t>>> owners;
  std::int64_t live = 0, most = 0;
  std::uintmax_t longest_half = 0, longest = 0;
  for (std::uint64_t o = 0; o < 10000; ++o) {
    auto& owner = owners.emplace_back();
    for (std::uint64_t b = random() % 8; b > 0; --b) {
      owner.emplace_back(store->put(random_bytes(o * 8 + b, 64 + random() % 4096 * (1 + b % 8))), o * 8 + b);
      live += (owner.back().first->size() + 63) / 64 * 64;
    }
    most = std::max(most, live);
    if (owners.size() > 64) {
      const auto leaves = owners.begin() + static_cast<std::ptrdiff_t>(random() % owners.size());
      for (const auto& [blob, seed] : *leaves) {
        if (o % 16 == 0) ASSERT_EQ(read(*blob), random_bytes(seed, static_cast<std::size_t>(blob->size())));
        live -= (blob->size() + 63) / 64 * 64;
      }
      owners.erase(leaves);
    }
    ASSERT_EQ(store->host_bytes() + store->file_bytes(), live);
    std::uintmax_t& length = o < 5000 ? longest_half : longest;
    length = std::max(length, fs::file_size(folder.file()));
  }
  EXPECT_GT(store->file_peak_bytes(), 0) << "both places were used";
  EXPECT_EQ(store->host_peak_bytes() <= store->slab_peak_bytes() && store->slab_peak_bytes() <= 2 << 20, true);
  EXPECT_LE(store->file_peak_bytes(), most);
  EXPECT_LE(longest, 2 * static_cast<std::uintmax_t>(store->file_peak_bytes())) << "room is used again";
  EXPECT_LE(longest, longest_half + longest_half / 4) << "the second half needs hardly more than the first";
  owners.clear();
  EXPECT_EQ(store->host_bytes(), 0);
  EXPECT_EQ(store->slab_bytes(), 0);
  EXPECT_EQ(store->file_bytes(), 0);
  EXPECT_EQ(store->blobs(), 0);
  EXPECT_EQ(fs::file_size(folder.file()), static_cast<std::uintmax_t>(kFirstLine));
}

TEST(FarStore, UsesRoomsOfTheFileAgainAndEndsItWithItsLastBlob) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const auto length = [&] { return static_cast<std::int64_t>(fs::file_size(folder.file())) - kFirstLine; };
  FarBlobPtr a = store->put(random_bytes(1, 1024)), b = store->put(random_bytes(2, 1024)),
             c = store->put(random_bytes(3, 1024));
  a = nullptr;
  EXPECT_EQ(length(), 3072);
  EXPECT_EQ(store->file_bytes(), 2048);
  a = store->put(random_bytes(4, 512));
  EXPECT_EQ(length(), 3072) << "in the room of the first";
  c = nullptr;
  EXPECT_EQ(length(), 2048);
  b = nullptr;
  EXPECT_EQ(length(), 512);
  EXPECT_EQ(read(*a), random_bytes(4, 512));
  a = nullptr;
  EXPECT_EQ(length(), 0);
}

TEST(FarStore, HandsOutRoomsOfHostMemoryAlone) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 8192, .file = folder.file(), .slab_bytes = 4096});
  auto room = store->room(100), other = store->room(1);
  EXPECT_EQ(room->size(), 128);
  EXPECT_EQ(store->host_bytes(), 192);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(room->bytes()) % 64, 0);
  std::fill_n(room->bytes(), room->size(), std::byte{3});
  EXPECT_THROW(static_cast<void>(store->room(8192, {.sequence = 5})), StateError) << "never into the file";
  EXPECT_EQ(store->host_bytes(), 192);
  EXPECT_EQ(store->file_bytes(), 0);
  room.reset();
  EXPECT_EQ(store->host_bytes(), 64);
  other.reset();
  EXPECT_EQ(store->slab_bytes(), 0);
}

TEST(FarStore, LivesAsLongAsItsBlobsAndTakesItsFileAlong) {
  const SpillFolder folder;
  auto store = FarStore::make({.host_bytes = 4096, .file = folder.file()});
  FarBlobPtr near = store->put(random_bytes(1, 4096)), far = store->put(random_bytes(2, 4096));
  EXPECT_TRUE(far->on_disk());
  EXPECT_EQ(fs::status(folder.file()).permissions(), fs::perms::owner_read | fs::perms::owner_write)
      << "a user's text is nobody else's";
  store = nullptr;
  EXPECT_EQ(read(*near), random_bytes(1, 4096));
  near = nullptr;
  EXPECT_EQ(read(*far), random_bytes(2, 4096));
  EXPECT_TRUE(fs::exists(folder.file()));
  far = nullptr;
  EXPECT_FALSE(fs::exists(folder.file()));
}

TEST(FarStore, SaysWhoseBytesAChangedFileHeld) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const FarBlobPtr whole = store->put(random_bytes(1, 4096)), damaged = store->put(random_bytes(2, 5000), kLabel);
  for (const std::int64_t at : {0, 1, 2500, 4999}) {
    const char was = read_at(folder.file(), kFirstLine + 4096 + at);
    write_at(folder.file(), kFirstLine + 4096 + at, static_cast<char>(was ^ 16));
    const std::string message = message_of<DamagedData>([&] { (void)read(*damaged); });
    expect_says(message, {"span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0",
                          "5000 bytes at offset 4160 of '" + folder.file().string() + "'", "checksum"});
    EXPECT_EQ(read(*whole), random_bytes(1, 4096));
    write_at(folder.file(), kFirstLine + 4096 + at, was);
    EXPECT_EQ(read(*damaged), random_bytes(2, 5000));
  }
}

TEST(FarStore, SaysWhoseBytesATruncatedFileHeld) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const FarBlobPtr whole = store->put(random_bytes(1, 4096));
  FarBlobPtr cut = store->put(random_bytes(2, 5000), kLabel), gone = store->put(random_bytes(3, 5000), {.sequence = 9});
  fs::resize_file(folder.file(), kFirstLine + 4096 + 100);
  expect_says(message_of<DamagedData>([&] { (void)read(*cut); }),
              {"span 17", "at offset 4160 of '" + folder.file().string() + "' end after 100", "truncated"});
  expect_says(message_of<DamagedData>([&] { (void)read(*gone); }), {"a blob of sequence 9", "end after 0"});
  EXPECT_EQ(read(*whole), random_bytes(1, 4096));
  gone = nullptr;
  EXPECT_THROW((void)read(*cut), DamagedData) << "a file that grew again is not what it was";
  cut = nullptr;
  const FarBlobPtr next = store->put(random_bytes(4, 6000));
  EXPECT_EQ(read(*next), random_bytes(4, 6000)) << "the file is used again";
}

TEST(FarStore, ReadsOnWhenItsFileWasDeletedAndLeavesANewOneAlone) {
  const SpillFolder folder;
  auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  FarBlobPtr before = store->put(random_bytes(1, 4096));
  fs::remove(folder.file());
  FarBlobPtr after = store->put(random_bytes(2, 4096));
  EXPECT_EQ(read(*before), random_bytes(1, 4096));
  EXPECT_EQ(read(*after), random_bytes(2, 4096));
  std::ofstream(folder.file()) << "somebody's";
  store = nullptr, before = after = nullptr;
  EXPECT_EQ(fs::file_size(folder.file()), 10U);
}

TEST(FarStore, MakesAFileThatWasThereItsUsersAlone) {
  const SpillFolder folder;
  std::ofstream(folder.file()).flush();
  fs::permissions(folder.file(), fs::perms::all);
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  EXPECT_EQ(fs::status(folder.file()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST(FarStore, TakesItsFileAlongWhereverTheProcessHasGone) {
  const SpillFolder folder;
  const fs::path here = fs::current_path();
  fs::current_path(folder.file().parent_path());
  auto store = FarStore::make({.host_bytes = 0, .file = folder.file().filename()});
  fs::current_path(here);
  EXPECT_TRUE(fs::exists(folder.file()));
  store = nullptr;
  EXPECT_FALSE(fs::exists(folder.file()));
}

TEST(FarStore, RefusesFilesThatAreNotItsOwn) {
  const SpillFolder folder;
  const auto refused = [](const fs::path& file, const std::vector<std::string>& parts) {
    expect_says(message_of<InvalidArgument>([&] { (void)FarStore::make({.file = file}); }), parts);
  };
  refused(folder.file("missing") / "far", {"cannot create file", "missing", "No such file"});
  refused(folder.file().parent_path(), {"cannot create file", "directory"});
  refused("/proc/kvkeep_far", {"cannot create file '/proc/kvkeep_far'"});
  if (::geteuid() != 0) {  // root writes everywhere
    fs::create_directory(folder.file("locked"));
    fs::permissions(folder.file("locked"), fs::perms::owner_read | fs::perms::owner_exec);
    refused(folder.file("locked") / "far", {"cannot create file", "Permission denied"});
  }
  std::ofstream(folder.file("letter"))
      << "Dear reader, this is no far store, and it is longer than one line of sixty-four bytes.";
  refused(folder.file("letter"), {"exists and is not a far store's", "letter"});
  EXPECT_EQ(read_at(folder.file("letter"), 0), 'D');
  EXPECT_EQ(fs::file_size(folder.file("letter")), 86U);
  refused(folder.file("letter") / "far", {"cannot create file", "Not a directory"});
  fs::create_symlink(folder.file("new"), folder.file("link"));
  refused(folder.file("link"), {"cannot create file", "not a link"});
  EXPECT_FALSE(fs::exists(folder.file("new")));

  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const FarBlobPtr blob = store->put(random_bytes(1, 100));
  refused(folder.file(), {"cannot lock", "another store uses it"});
  EXPECT_EQ(read(*blob), random_bytes(1, 100));
}

TEST(FarStore, BeginsAnewWhatAKilledProcessLeft) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const FarBlobPtr blob = store->put(random_bytes(1, 1000));
  fs::copy_file(folder.file(), folder.file("left"));
  std::ofstream(folder.file("empty")).close();
  for (const char* name : {"left", "empty"}) {
    {
      const auto next = FarStore::make({.host_bytes = 0, .file = folder.file(name)});
      EXPECT_EQ(fs::file_size(folder.file(name)), static_cast<std::uintmax_t>(kFirstLine));
      EXPECT_EQ(read(*next->put(random_bytes(2, 1000))), random_bytes(2, 1000));
    }
    EXPECT_FALSE(fs::exists(folder.file(name)));
  }
}

/// Files of this process end at `bytes`, as on a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(std::int64_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &was_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit now{static_cast<rlim_t>(bytes), was_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &was_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit was_{};
  void (*handler_)(int);
};

TEST(FarStore, ChangesNothingWhenTheDiskIsFull) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 0, .file = folder.file()});
  const FarBlobPtr blob = store->put(random_bytes(1, 1000));
  {
    const FullDisk full(3000);
    expect_says(message_of<DeviceError>([&] { (void)store->put(random_bytes(2, 5000), kLabel); }),
                {"writing 5000 bytes of span 17", folder.file().string(), "File too large"});
    EXPECT_EQ(store->file_bytes(), 1024);
    EXPECT_EQ(store->blobs(), 1);
    EXPECT_EQ(fs::file_size(folder.file()), static_cast<std::uintmax_t>(kFirstLine + 1024))
        << "what was written of it is gone";
    EXPECT_EQ(read(*store->put(random_bytes(3, 1500))), random_bytes(3, 1500)) << "a smaller one still fits";
  }
  EXPECT_EQ(read(*store->put(random_bytes(2, 5000))), random_bytes(2, 5000));
  EXPECT_EQ(read(*blob), random_bytes(1, 1000));
  const FullDisk full(10);
  EXPECT_THROW((void)FarStore::make({.file = folder.file("second")}), DeviceError);
  EXPECT_FALSE(fs::exists(folder.file("second")));
}

TEST(FarStore, ChangesNothingWhenTheSystemHasNoMemory) {
  bool empty = true;
  CountedSlabs slabs;
  FarStoreOptions options = slabs.options();
  options.allocate = [&, give = options.allocate](std::int64_t bytes) { return empty ? nullptr : give(bytes); };
  const auto store = FarStore::make(options);
  expect_says(message_of<DeviceError>([&] { (void)store->put(random_bytes(1, 100)); }),
              {"no memory for a slab of 1048576 bytes"});
  EXPECT_EQ(store->slab_bytes() + store->host_bytes() + store->blobs() + store->slab_peak_bytes(), 0);
  empty = false;
  EXPECT_EQ(read(*store->put(random_bytes(1, 100))), random_bytes(1, 100));
}

TEST(FarStore, NamesEveryOptionThatIsNotAllowed) {
  EXPECT_TRUE(FarStoreOptions{}.problems().empty());
  FarStoreOptions wrong{.host_bytes = -1, .file_bytes = -2, .slab_bytes = 100};
  wrong.allocate = [](std::int64_t) -> std::byte* { return nullptr; };
  EXPECT_EQ(wrong.problems().size(), 5U);
  expect_says(message_of<InvalidArgument>([&] { (void)FarStore::make(wrong); }),
              {"host_bytes: -1", "file_bytes: -2", "without a file", "slab_bytes: 100", "allocate, release"});
}

TEST(FarStore, ServesThreadsAtOnce) {
  const SpillFolder folder;
  const auto store = FarStore::make({.host_bytes = 1 << 18, .file = folder.file(), .slab_bytes = 1 << 14});
  std::atomic<std::int64_t> wrong{0}, disk{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<std::pair<FarBlobPtr, std::uint64_t>> held;
      for (std::uint64_t i = 0; i < 600; ++i) {
        const std::uint64_t seed = t * 1000 + i;
        held.emplace_back(store->put(random_bytes(seed, random() % 9000)), seed);
        if (held.back().first->on_disk()) ++disk;
        if (held.size() > 30) held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
        const auto& [blob, of] = held[random() % held.size()];
        if (read(*blob) != random_bytes(of, static_cast<std::size_t>(blob->size()))) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(disk, 0);
  EXPECT_EQ(store->host_bytes() + store->file_bytes() + store->blobs() + store->slab_bytes(), 0);
}

TEST(FarLabel, IsToldAsFarAsItIsKnown) {
  EXPECT_EQ(text(kLabel), "span 17 (tokens 210 to 273) of sequence 3, layer 2, head 0");
  EXPECT_EQ(text(FarLabel{}), "a blob");
  EXPECT_EQ(text(FarLabel{.layer = 0, .span = 0}), "span 0 of layer 0");
  EXPECT_EQ(text(FarLabel{.sequence = 5, .begin = 0, .end = 1}), "a blob (tokens 0 to 0) of sequence 5");
}

TEST(Checksum, SeesEveryBitThatFlips) {
  for (std::size_t size = 1; size <= 200; ++size) {
    Data bytes = random_bytes(size, size);
    const std::uint64_t whole = checksum(bytes);
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
      EXPECT_NE(checksum(bytes), whole) << size << " bytes, bit " << bit;
      bytes[bit / 8] ^= std::byte{1} << bit % 8;
    }
    EXPECT_EQ(checksum(bytes), whole);
  }
}

TEST(Checksum, SeesWhatMovedWasLostOrAdded) {
  std::set<std::uint64_t> sums;
  for (std::size_t size = 0; size <= 300; ++size) sums.insert(checksum(Data(size)));
  EXPECT_EQ(sums.size(), 301U) << "zeros of any length";
  Data bytes = random_bytes(1, 1024);
  for (const std::size_t a : {0, 8, 64, 512})
    for (const std::size_t b : {16, 72, 128, 960}) {
      Data swapped = bytes;
      std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(a),
                       swapped.begin() + static_cast<std::ptrdiff_t>(a) + 8,
                       swapped.begin() + static_cast<std::ptrdiff_t>(b));
      EXPECT_TRUE(sums.insert(checksum(swapped)).second) << a << " and " << b;
    }
  Data shifted = bytes;
  std::rotate(shifted.begin(), shifted.begin() + 64, shifted.end());
  EXPECT_TRUE(sums.insert(checksum(shifted)).second) << "blocks in another order";
}

TEST(Checksum, SeesABitThatFlipsInTwoWords) {
  Data bytes = random_bytes(1, 512);
  const std::uint64_t whole = checksum(bytes);
  for (std::size_t bit = 0; bit < 64; ++bit)
    for (std::size_t apart = 8; apart <= 384; apart += 8) {
      const auto flip = [&](std::size_t word) { bytes[word + bit / 8] ^= std::byte{1} << bit % 8; };
      flip(64), flip(64 + apart);
      EXPECT_NE(checksum(bytes), whole) << "bit " << bit << " of words " << apart << " bytes apart";
      flip(64), flip(64 + apart);
    }
}

TEST(Checksum, SpreadsOverAllItsBits) {
  std::vector<int> ones(64);
  constexpr int kCases = 4000;
  for (int i = 0; i < kCases; ++i) {
    Data bytes(256);
    const std::uint64_t a = checksum(bytes);
    bytes[static_cast<std::size_t>(i) % 256] = static_cast<std::byte>(1 + i / 256);
    for (int bit = 0; bit < 64; ++bit) ones[static_cast<std::size_t>(bit)] += (a ^ checksum(bytes)) >> bit & 1;
  }
  for (const int count : ones) EXPECT_NEAR(count, kCases / 2, kCases / 8);
}

}  // namespace
}  // namespace kvkeep::far_store_test
