// Threads that share out the chunks of one job after another.
//
// Whoever calls takes part, and takes chunks until none is left: a thread that the operating system runs elsewhere is waited for only
// while it is inside a chunk, never at a barrier. Waiting spins briefly, then sleeps in the kernel. One job at a time: a second caller
// does its whole job alone, so concurrent calls cannot wait for each other.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define OCTAVO_PAUSE() _mm_pause()
#else
#define OCTAVO_PAUSE() std::this_thread::yield()
#endif

namespace octavo {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    stop_.store(true);
    ticket_.store(0);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls f(0) … f(count − 1), each once, in any order; returns when all have returned. `shared` is false for a caller that does not hold
  // the pool: it does all of it.
  template <class Fn>
  void run(bool shared, int count, Fn&& f) {
    if (!shared || count <= 1 || workers_.empty()) {
      for (int i = 0; i < count; i++) f(i);
      return;
    }
    call_ = [](void* fn, int i) { (*static_cast<std::remove_reference_t<Fn>*>(fn))(i); };
    fn_ = &f;
    left_.store(count, std::memory_order_relaxed);
    ticket_.store(uint32_t(count), std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    take_chunks();
    wait_for_others();
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // `ticket_` counts down the chunks nobody has taken; who takes chunk i holds the job open, for `left_` cannot reach 0 before it is done.
  void take_chunks() {
    uint32_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      call_(fn_, int(ticket) - 1);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void wait_for_others() {
    for (int spin = 0; spin < kSpins; spin++) {
      if (!left_.load(std::memory_order_acquire)) return;
      OCTAVO_PAUSE();
    }
    for (int left; (left = left_.load(std::memory_order_acquire));) left_.wait(left, std::memory_order_acquire);
  }

  void work() {
    uint32_t seen = 0;
    while (!stop_.load(std::memory_order_acquire)) {
      take_chunks();
      for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; spin++) OCTAVO_PAUSE();
      epoch_.wait(seen, std::memory_order_acquire);
      seen = epoch_.load(std::memory_order_acquire);
    }
  }

  static constexpr int kSpins = 2000;

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  alignas(64) std::atomic<uint32_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> left_{0};
  void (*call_)(void*, int) = nullptr;
  void* fn_ = nullptr;
  std::atomic<bool> stop_{false};
};

// A caller's hold on the pool: for one operation of several jobs.
class Team {
 public:
  explicit Team(Pool& pool) : pool_(pool), lock_(pool.mutex(), std::try_to_lock) {}
  int threads() const { return lock_.owns_lock() ? pool_.threads() : 1; }

  template <class Fn>
  void run(int count, Fn&& f) {
    pool_.run(lock_.owns_lock(), count, f);
  }

 private:
  Pool& pool_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace octavo
