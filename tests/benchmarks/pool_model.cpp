// A model of loops on more cores than this machine has: which cache lines the threads of a pool read and write, and when. Reads from its
// input the nanoseconds of an atomic on a core's own line and of a line's way between cores, then requests
//   STEP THREADS REPEATS     a decode step's loops ("qwen3-0.6b", "llama-3-8b"), or "empty": as many loops of no work
// and answers each with microseconds of a step: without any pool (bytes at the machine's bandwidth), with one counter, with shares.
//
// The rules. A line is written by one core at a time, who must fetch it unless it was the last to touch it; those who want it wait in turn.
// Copies for reading are handed out kReaders times as fast as the right to write. Who reads or writes many different lines one after another
// has kOverlap of them under way at once. A socket of 64 cores reads 250 GB/s, one core 12 GB/s at most; threads differ by some percent.
#include <algorithm>
#include <coroutine>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr double kReaders = 4, kOverlap = 8;
constexpr double kSocket = 250, kCore = 12;  // bytes a nanosecond
constexpr int kCores = 64;                   // of a socket
constexpr double kGap = 1000;                // ns between two loops of a step, for the launch of the next kernel

struct {
  double own, way;
} cost;

// ---- time ----
struct Event {
  double time;
  uint64_t order;
  std::coroutine_handle<> who;
  bool operator<(const Event& other) const { return std::pair(other.time, other.order) < std::pair(time, order); }
};
double now = 0;
std::priority_queue<Event> events;

void resume_at(double time, std::coroutine_handle<> who) {
  static uint64_t order = 0;
  events.push({time, order++, who});
}

struct Until {
  double time;
  bool await_ready() const { return false; }
  void await_suspend(std::coroutine_handle<> who) const { resume_at(time, who); }
  void await_resume() const {}
};
Until spend(double ns) { return {now + ns}; }

// A coroutine that its awaiter waits for; one that nobody awaits is a thread.
struct Task {
  struct promise_type {
    std::coroutine_handle<> awaiter;
    Task get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() { return {}; }
    struct End {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> of) noexcept {
        return of.promise().awaiter ? of.promise().awaiter : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    End final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
  std::coroutine_handle<promise_type> handle;

  struct Awaiter {
    std::coroutine_handle<promise_type> handle;
    bool await_ready() { return false; }
    std::coroutine_handle<> await_suspend(std::coroutine_handle<> awaiter) {
      handle.promise().awaiter = awaiter;
      return handle;
    }
    void await_resume() { handle.destroy(); }
  };
  Awaiter operator co_await() const { return {handle}; }
};

// ---- cache lines ----
struct Line {
  int64_t value = 0;
  double free = 0;
  int owner = -1;                // who may write without asking
  std::vector<bool> copies;      // who may read without asking
  std::vector<std::pair<int, std::coroutine_handle<>>> pollers;

  Line() : copies(256) {}

  // When a write that begins now is done.
  double write(int who, double from) {
    const bool has = owner == who;
    free = has ? std::max(from, free) + cost.own : std::max(from, free) + cost.way;
    owner = who;
    copies.assign(copies.size(), false);
    copies[size_t(who)] = true;
    return free;
  }
  double read(int who, double from) {
    if (copies[size_t(who)]) return from + 1;
    const double begins = std::max(from, free);
    free = begins + cost.way / kReaders;
    owner = -1;
    copies[size_t(who)] = true;
    return begins + cost.way;
  }
  // Those who poll see the value.
  void show(int64_t shown, double at) {
    value = shown;
    for (auto [who, handle] : std::exchange(pollers, {})) resume_at(read(who, at), handle);
  }
};

struct Changed {  // returns when the line's value is another
  Line& line;
  int who;
  int64_t from;
  bool await_ready() const { return false; }
  void await_suspend(std::coroutine_handle<> handle) const {
    if (line.value != from) resume_at(line.read(who, now), handle);
    else line.pollers.emplace_back(who, handle);
  }
  void await_resume() const {}
};

// ---- loops ----
struct Work {
  int64_t grains;
  double bytes;  // of a grain
};

std::mt19937 random_bits(1);
double time_of(double bytes, int threads) {
  const double total = kSocket * ((threads + kCores - 1) / kCores);
  const double unevenness = std::uniform_real_distribution(1.0, 1.06)(random_bits);
  return bytes / std::min(kCore, total / threads) * unevenness;
}

struct Share {
  int64_t first, count;
};
Share share_of(int64_t n, int64_t parts, int64_t i) {
  return {i * (n / parts) + std::min(i, n % parts), n / parts + (i < n % parts)};
}

// One counter, one word for all who enter and leave.
struct OneCounter {
  const int threads;
  Line loop, members, next, epoch;
  Work work{};
  int64_t chunk = 0;

  Task chunks(int me) {
    for (;;) {
      co_await Until{next.write(me, now)};
      const int64_t begin = next.value;
      next.value += chunk;
      if (begin >= work.grains) co_return;
      co_await spend(time_of(work.bytes * double(std::min(chunk, work.grains - begin)), threads));
    }
  }
  Task helper(int me) {
    for (int64_t seen = 0;;) {
      co_await Changed{epoch, me, seen};
      seen = epoch.value;
      co_await Until{members.read(me, now)};
      co_await Until{members.write(me, now)};
      if (!(members.value & 1)) continue;  // closed
      members.value += 2;
      co_await Until{loop.read(me, now)};
      co_await chunks(me);
      co_await Until{members.write(me, now)};
      members.show(members.value - 2, now);
    }
  }
  Task run(Work of) {
    co_await Until{loop.write(0, now)};
    work = of;
    chunk = std::max<int64_t>(1, of.grains / (threads * 8));
    co_await Until{next.write(0, now)};
    next.value = 0;
    co_await Until{members.write(0, now)};
    members.value = 1;
    co_await Until{epoch.write(0, now)};
    epoch.show(epoch.value + 1, now);
    co_await chunks(0);
    co_await Until{members.write(0, now)};
    members.value -= 1;
    while (members.value) co_await Changed{members, 0, members.value};
  }
};

// A share each, two lines each.
struct Shares {
  const int threads;
  std::vector<Line> called, place;  // the value of a place: pieces taken
  std::vector<bool> is_inside;
  Work work{};
  int shares = 0;
  int64_t number = 0;

  explicit Shares(int threads) : threads(threads), called(size_t(threads)), place(size_t(threads)), is_inside(size_t(threads)) {}

  Task pieces(int me, int64_t of) {
    Line& mine = place[size_t(me)];
    for (int i = 0; of == number && i < shares; ++i) {
      const int owner = (me + i) % shares;
      Line& line = place[size_t(owner)];
      const int64_t count = share_of(work.grains, shares, owner).count, most = std::min<int64_t>(32, count);
      const double seen = line.read(me, now);  // looks, which overlap, before it writes
      co_await Until{now + (seen - now) / (line.value < most ? 1 : kOverlap)};
      if (of != number || line.value >= most) continue;
      co_await Until{mine.write(me, now)};
      is_inside[size_t(me)] = true;
      while (of == number && line.value < most) {
        co_await Until{line.write(me, now)};
        if (of != number || line.value >= most) break;
        const int64_t piece = line.value++;
        co_await spend(time_of(work.bytes * double(share_of(count, most, piece).count), shares));
      }
      co_await Until{mine.write(me, now)};
      is_inside[size_t(me)] = false;
      mine.show(mine.value, now);
    }
  }
  Task helper(int me) {
    for (int64_t seen = 0;;) {
      co_await Changed{called[size_t(me)], me, seen};
      seen = called[size_t(me)].value;
      co_await pieces(me, seen);
    }
  }
  Task run(Work of) {
    work = of;
    ++number;
    shares = int(std::min<int64_t>(threads, of.grains));
    for (Line& line : place) line.value = 0;  // by the number of the loop, which is a part of the word
    const double began = now;
    for (int i = 1; i < shares; ++i) called[size_t(i)].show(number, called[size_t(i)].write(0, began + cost.way / kOverlap * (i - 1)));
    co_await spend(cost.way + cost.own * (shares - 1));
    co_await pieces(0, number);
    for (int i = 1; i < shares; ++i) {
      const double seen = place[size_t(i)].read(0, now);
      co_await Until{now + (seen - now) / kOverlap};
      while (is_inside[size_t(i)]) co_await Changed{place[size_t(i)], 0, place[size_t(i)].value};
    }
    ++number;  // who comes now is late
  }
};

// ---- steps ----
// Grains of a linear layer for one row: groups of 48 weight rows, 8 chunks a thread, of 64 KB at least.
Work linear(int64_t rows, int64_t columns, int threads) {
  const int64_t groups = (rows + 47) / 48, bytes = 48 * columns * 2;
  const int64_t grain = std::max<int64_t>({1, groups / (threads * 8), (65536 + bytes - 1) / bytes});
  return {(groups + grain - 1) / grain, double(grain * bytes)};
}

std::vector<Work> loops_of(const std::string& step, int threads) {
  struct Model {
    int layers;
    int64_t width, inner, heads, keys, vocabulary;
  };
  std::vector<Work> all;
  if (step == "empty") return std::vector<Work>(250, Work{8 * threads, 0});
  const Model m = step == "qwen3-0.6b" ? Model{28, 1024, 3072, 2048, 1024, 151936} : Model{32, 4096, 14336, 4096, 1024, 128256};
  for (int layer = 0; layer < m.layers; ++layer) {
    all.push_back(linear(m.heads + 2 * m.keys, m.width, threads));
    all.push_back({16, 32768});  // attention over a short context, in 16 tasks
    all.push_back(linear(m.width, m.heads, threads));
    all.push_back(linear(2 * m.inner, m.width, threads));
    all.push_back(linear(m.width, m.inner, threads));
    all.push_back({4, 4096});  // activation
  }
  all.push_back(linear(m.vocabulary, m.width, threads));
  return all;
}

template <class Pool>
Task steps(Pool& pool, const std::vector<Work>& loops, int repeats, double* microseconds) {
  const double began = now;
  for (int i = 0; i < repeats; ++i) {
    for (const Work& each : loops) {
      co_await spend(kGap);
      co_await pool.run(each);
    }
  }
  *microseconds = (now - began) / repeats / 1000;
}

template <class Pool>
double simulated(const std::vector<Work>& loops, int threads, int repeats) {
  now = 0;
  events = {};
  random_bits.seed(1);
  auto& pool = *new Pool(threads);  // its threads never end
  double microseconds = 0;
  for (int i = 1; i < threads; ++i) resume_at(0, pool.helper(i).handle);
  resume_at(0, steps(pool, loops, repeats, &microseconds).handle);
  while (microseconds == 0) {
    const Event event = events.top();
    events.pop();
    now = event.time;
    event.who.resume();
  }
  return microseconds;
}

double alone(const std::vector<Work>& loops, int threads) {
  double ns = 0;
  for (const Work& each : loops) {
    const int busy = int(std::min<int64_t>(threads, each.grains));
    ns += kGap + double(each.grains) * each.bytes / busy / std::min(kCore, kSocket * ((busy + kCores - 1) / kCores) / busy);
  }
  return ns / 1000;
}

}  // namespace

int main() {
  std::cin >> cost.own >> cost.way;
  int threads = 0, repeats = 0;
  for (std::string step; std::cin >> step >> threads >> repeats; std::fflush(stdout)) {
    const auto loops = loops_of(step, threads);
    std::printf("%.1f %.1f %.1f\n", alone(loops, threads), simulated<OneCounter>(loops, threads, repeats),
                simulated<Shares>(loops, threads, repeats));
  }
}
