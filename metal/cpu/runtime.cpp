// Runs a compiled kernel: one fiber per GPU thread, barriers, and the rendezvous of a simdgroup's lanes.
//
// Threadgroups run one after the other, so that nothing but the kernel's own barriers orders their threads. A fiber
// runs until it waits; then the next runnable one goes on, in turn or, with a seed, in a shuffled order. Waiting for
// each other at different operations, or for threads that have returned, is divergence and is reported.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>

#include "state.h"

extern "C" void fiber_switch(void** save, void* to);
extern "C" void* fiber_prepare(void* top, void (*run)());

Runtime runtime;

namespace {

char slots[MAX_SIMDGROUPS][2][LANES][SLOT_BYTES] __attribute__((aligned(64)));
void* main_stack;
void (*entry)(void**);
void* arguments[MAX_BUFFERS];
int barrier_arrived, barrier_flags;
Site barrier_site;
uint64_t shuffle;  // state of the generator that shuffles the run order; 0: in turn

struct Queue {  // fibers that can run
  uint16_t items[4 * MAX_THREADS];
  unsigned head = 0, tail = 0;
  bool empty() const { return head == tail; }
  uint16_t& at(unsigned i) { return items[i % (4 * MAX_THREADS)]; }
  void push(int fiber) { at(tail++) = uint16_t(fiber); }
  int pop() {
    if (shuffle && tail - head > 1) {
      shuffle ^= shuffle << 13; shuffle ^= shuffle >> 7; shuffle ^= shuffle << 17;
      const unsigned other = head + shuffle % (tail - head);
      const uint16_t item = at(head); at(head) = at(other); at(other) = item;
    }
    return at(head++);
  }
} queue;

void to_main() { fiber_switch(&runtime.self().stack_pointer, main_stack); }

void wait() {  // give way until somebody makes this fiber runnable again
  Fiber& me = runtime.self();
  if (runtime.watches_private) private_flush();
  if (queue.empty()) return to_main();
  runtime.current = queue.pop();
  if (&runtime.self() != &me) fiber_switch(&me.stack_pointer, runtime.self().stack_pointer);
}

void wake(int fiber) {
  if (fiber == runtime.current) return;
  runtime.fibers[fiber].wait = RUNNABLE;
  queue.push(fiber);
}

// Walks the frames of the caller. Runtime and kernels are built with frame pointers; the first frame's link is 0.
__attribute__((always_inline)) inline Site caller() {
  Site site;
  site.pc = uint64_t(__builtin_return_address(0));
  for (void** frame = (void**)__builtin_frame_address(0); frame; frame = (void**)frame[0])
    site.chain = (site.chain ^ uint64_t(frame[1])) * 0x9E3779B97F4A7C15ull;
  return site;
}

void simd_release(Simdgroup& group) {
  for (int lane = 0; lane < LANES; lane++)
    if (group.waiting >> lane & 1) wake(group.members[lane]);
  group.took_part = group.waiting;
  group.waiting = 0; group.arrived = 0; group.phase++;
}

// Metal would let the remaining lanes go on, but whether a lane had returned before or skipped the operation can then
// not be told apart.
void report_returned_lanes(const Simdgroup& group) {
  report(SIMD_DIVERGES, group.site.pc, 0, "%d lanes of simdgroup %u returned, the others are here",
         int(runtime.self().thread.lanes_in_simdgroup) - group.alive, runtime.self().thread.simdgroup);
  abandon_launch();
}

bool simd_arrive(int operation, Site site) {  // true for the lane that came last
  Fiber& me = runtime.self();
  Simdgroup& group = runtime.simdgroup();
  if (group.arrived && (group.site.chain != site.chain || group.operation != operation)) {
    report(SIMD_DIVERGES, site.pc, group.site.pc, "lane %u is here while %d lanes of simdgroup %u wait at {other}",
           me.thread.lane, group.arrived, me.thread.simdgroup);
    abandon_launch();
  }
  group.site = me.site = site;
  group.operation = operation;
  group.waiting |= 1u << me.thread.lane;
  if (group.alive < int(me.thread.lanes_in_simdgroup)) report_returned_lanes(group);
  if (++group.arrived == group.alive) {
    simd_release(group);
    return true;
  }
  me.wait = AT_SIMD;
  wait();
  return false;
}

void run_fiber() {
  entry(arguments);
  Fiber& me = runtime.self();
  Simdgroup& group = runtime.simdgroup();
  me.wait = RETURNED;
  runtime.returned++;
  group.alive--;
  if (barrier_arrived) {
    report(BARRIER_DIVERGES, barrier_site.pc, 0, "thread %u returned while %d threads wait here",
           me.thread.index_in_group, barrier_arrived);
    abandon_launch();
  }
  if (group.arrived) report_returned_lanes(group);
  wait();
  __builtin_trap();
}

void report_deadlock() {
  int at_barrier = 0, at_simd = 0;
  Site barrier, simd;
  for (int i = 0; i < runtime.threads; i++) {
    const Fiber& fiber = runtime.fibers[i];
    if (fiber.wait == AT_BARRIER) at_barrier++, barrier = fiber.site;
    if (fiber.wait == AT_SIMD) at_simd++, simd = fiber.site;
  }
  report(at_simd ? SIMD_DIVERGES : BARRIER_DIVERGES, at_simd ? simd.pc : barrier.pc, barrier.pc,
         "deadlock: %d threads returned, %d wait at a barrier ({other}), %d at a simdgroup operation",
         runtime.returned, at_barrier, at_simd);
  runtime.aborted = true;
}

void begin_group(const LaunchDescription& launch, const unsigned group[3], const unsigned groups[3]) {
  unsigned size[3];
  for (int i = 0; i < 3; i++) {
    const unsigned left = launch.grid[i] - group[i] * launch.threadgroup[i];
    size[i] = left < launch.threadgroup[i] ? left : launch.threadgroup[i];  // the last one may be smaller
  }
  const int threads = runtime.threads = int(size[0] * size[1] * size[2]);
  const unsigned full = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  runtime.returned = barrier_arrived = 0;
  runtime.epoch_threadgroup = runtime.epoch_device = 0;
  queue.head = queue.tail = 0;
  for (int t = 0; t < threads; t++) {
    Fiber& fiber = runtime.fibers[t];
    GpuThread& thread = fiber.thread;
    const unsigned position[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
    for (int i = 0; i < 3; i++) {
      thread.group_in_grid[i] = group[i];
      thread.position_in_group[i] = position[i];
      thread.position_in_grid[i] = group[i] * launch.threadgroup[i] + position[i];
      thread.threads_per_grid[i] = launch.grid[i];
      thread.threads_per_group[i] = size[i];
      thread.full_threads_per_group[i] = launch.threadgroup[i];
      thread.groups_per_grid[i] = groups[i];
    }
    thread.index_in_group = unsigned(t);
    thread.lane = unsigned(t % LANES);
    thread.simdgroup = unsigned(t / LANES);
    thread.simdgroups = unsigned((threads + LANES - 1) / LANES);
    thread.full_simdgroups = (full + LANES - 1) / LANES;
    Simdgroup& simdgroup = runtime.simdgroups[thread.simdgroup];
    if (thread.lane == 0) {
      simdgroup = Simdgroup{};
      simdgroup.alive = threads - t < LANES ? threads - t : LANES;
    }
    thread.lanes_in_simdgroup = unsigned(simdgroup.alive);
    simdgroup.members[thread.lane] = t;
    fiber.stack_pointer = fiber_prepare(runtime.stack_of(t) + STACK_BYTES - 64, run_fiber);
    fiber.wait = RUNNABLE;
    queue.push(t);
  }
  memory_begin_group();
}

void run_group() {
  while (!queue.empty() && !runtime.aborted) {
    runtime.current = queue.pop();
    fiber_switch(&main_stack, runtime.self().stack_pointer);
  }
  if (!runtime.aborted && runtime.returned != runtime.threads) report_deadlock();
  runtime.current = -1;
  runtime.counts.groups++;
}

// A kernel that does not end is stopped after its share of processor time. The timer counts this process's time and
// leaves the real-time alarm to others. The handler runs on the fiber's stack, and leaves it for good.
pthread_t launching_thread;

void stop_endless(int signal) {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    pthread_kill(launching_thread, signal);
    return;
  }
  if (runtime.current < 0 || runtime.aborted) return;
  report(ENDLESS, 0, 0, "the launch did not end within its processor time");
  abandon_launch();
}

void set_timer(unsigned seconds) {
  struct sigaction action = {};
  action.sa_handler = stop_endless;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGVTALRM, &action, nullptr);
  launching_thread = pthread_self();
  itimerval timer = {};
  timer.it_value.tv_sec = seconds;
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

void make_stacks() {
  const size_t size = (STACK_BYTES + GUARD_BYTES) * MAX_THREADS;
  runtime.stacks = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  for (int t = 0; t < MAX_THREADS; t++) mprotect(runtime.stack_of(t) - GUARD_BYTES, GUARD_BYTES, PROT_NONE);
}

}  // namespace

void report(Kind kind, uint64_t pc, uint64_t other_pc, const char* format, ...) {
  Report item = {};
  item.kind = kind;
  item.group = runtime.group;
  item.thread = runtime.current < 0 ? 0 : runtime.self().thread.index_in_group;
  item.pc = pc;
  item.other_pc = other_pc;
  va_list values;
  va_start(values, format);
  vsnprintf(item.message, sizeof item.message, format, values);
  va_end(values);
  int& count = runtime.counts.reports;
  for (int i = 0; i < count; i++) {  // one report per place
    const Report& known = runtime.reports[i];
    if (known.kind == kind && known.pc == pc && known.other_pc == other_pc) return;
  }
  if (count < MAX_REPORTS) runtime.reports[count++] = item;
}

void abandon_launch() {
  runtime.aborted = true;
  to_main();
  __builtin_trap();
}

extern "C" GpuThread* gpu_self() { return &runtime.self().thread; }

extern "C" void gpu_bad_lane(const char* what) { report(BAD_LANE, runtime.self().site.pc, 0, "%s", what); }

extern "C" __attribute__((noinline)) const char* gpu_exchange(int operation, const void* value, unsigned bytes,
                                                              unsigned* mask) {
  const Site site = caller();
  Simdgroup& group = runtime.simdgroup();
  char(*phase)[SLOT_BYTES] = slots[runtime.self().thread.simdgroup][group.phase & 1];
  if (runtime.watches_private) private_check(value, bytes, site.pc);
  memcpy(phase[runtime.self().thread.lane], value, bytes);
  runtime.counts.simd_operations++;
  simd_arrive(operation, site);
  *mask = group.took_part;
  return &phase[0][0];
}

extern "C" __attribute__((noinline)) void gpu_simdgroup_barrier(int flags) {
  const Site site = caller();
  runtime.counts.simdgroup_barriers++;
  Simdgroup& group = runtime.simdgroup();
  if (!simd_arrive(-1 - flags, site)) return;
  if (flags & 1) group.epoch_device++;
  if (flags & 2) group.epoch_threadgroup++;
}

extern "C" __attribute__((noinline)) void gpu_threadgroup_barrier(int flags) {
  const Site site = caller();
  Fiber& me = runtime.self();
  runtime.counts.barriers++;
  if (runtime.returned) {
    report(BARRIER_DIVERGES, site.pc, 0, "reached by thread %u after %d of %d threads have returned",
           me.thread.index_in_group, runtime.returned, runtime.threads);
    abandon_launch();
  }
  if (barrier_arrived && (barrier_site.chain != site.chain || barrier_flags != flags)) {
    report(BARRIER_DIVERGES, site.pc, barrier_site.pc, "thread %u is here while %d threads wait at {other}",
           me.thread.index_in_group, barrier_arrived);
    abandon_launch();
  }
  barrier_site = me.site = site;
  barrier_flags = flags;
  if (++barrier_arrived < runtime.threads) {
    me.wait = AT_BARRIER;
    return wait();
  }
  barrier_arrived = 0;
  if (flags & 1) runtime.epoch_device++;
  if (flags & 2) runtime.epoch_threadgroup++;
  for (int i = 0; i < runtime.threads; i++) wake(i);
}

extern "C" void gpu_launch(const LaunchDescription* launch, LaunchCounts* counts) {
  if (!runtime.stacks) make_stacks();
  runtime.counts = LaunchCounts{};
  runtime.aborted = false;
  runtime.checked = launch->build == CHECKED;
  runtime.watches_private = launch->build == PRIVATE;
  runtime.threadgroup_limit = launch->threadgroup_limit;
  entry = launch->entry;
  shuffle = launch->seed ? launch->seed * 0x9E3779B97F4A7C15ull | 1 : 0;
  for (int i = 0; i < launch->buffers; i++) arguments[i] = (void*)launch->base[i];
  memory_begin_launch(*launch);
  set_timer(launch->cpu_seconds);
  unsigned groups[3], group[3];
  for (int i = 0; i < 3; i++) groups[i] = (launch->grid[i] + launch->threadgroup[i] - 1) / launch->threadgroup[i];
  const unsigned all = groups[0] * groups[1] * groups[2];
  for (runtime.group = 0; runtime.group < all && !runtime.aborted; runtime.group++) {
    group[0] = runtime.group % groups[0];
    group[1] = runtime.group / groups[0] % groups[1];
    group[2] = runtime.group / groups[0] / groups[1];
    begin_group(*launch, group, groups);
    run_group();
  }
  set_timer(0);
  memory_end_launch();
  *counts = runtime.counts;
}

extern "C" const Report* gpu_report(int i) { return &runtime.reports[i]; }
