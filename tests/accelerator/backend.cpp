// Eight accelerators without hardware: their streams are asynchronous, their kernels are the CPU's.
//
// A stream is a queue of tasks. It has no thread: whoever enqueues or synchronises runs tasks, one at a time.
// "eager" runs each at once; with it goes the detector, which reports two accesses to the same bytes that no
// stream, event or host puts in order. "lazy" runs what a synchronisation needs and nothing else, "random" now
// and then a stream ahead of the others: what does not wait for what it needs gets wrong numbers.
//
// Not seen: races between threads of the host (what one of them has waited for counts for all), and, by the
// detector, what the host reads too early. A tensor's bytes are all of those from its first to its last.
#include <Python.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <chrono>
#include <random>

namespace {

using at::Generator, at::Tensor, c10::DataPtr, c10::Device, c10::DeviceIndex, c10::DispatchKey;
using c10::DispatchKeySet, c10::IValue, c10::OperatorHandle, c10::Storage, c10::Stream, torch::jit::Stack;
using std::optional, std::string, std::vector;
using Clock = vector<uint64_t>;  // for each queue, how many of its tasks are known to have ended
using Handle = std::shared_ptr<struct Block>;
using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr auto kOurs = c10::DeviceType::PrivateUse1;
constexpr DispatchKeySet kOurKeys(DispatchKey::PrivateUse1), kCpuKeys(DispatchKey::CPU);
constexpr int kNumDevices = 8, kPoison = 0xFF;  // NaN to floating-point numbers, -1 to integers
constexpr size_t kDeviceBytes = size_t(1) << 30;

// Who waits for the machine does not hold Python's lock: a task may need it to let go of a tensor.
std::recursive_mutex& mutex = *new std::recursive_mutex;
class Lock {
  PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  std::unique_lock<std::recursive_mutex> lock{mutex};

 public:
  ~Lock() { lock.unlock(); if (python) PyEval_RestoreThread(python); }
};

// ---- The machine: memory, tasks, queues, and who runs them when ----

struct Access { Handle block; size_t begin, end; bool writes; };
struct Past { size_t queue, tick, begin, end; bool writes; string name; };  // an access, remembered

struct Block {  // lives until no tensor and no task needs it
  const size_t bytes;
  struct Queue* const owner;  // the stream that was current at the allocation; none if it is pinned
  void* const data = std::memset(std::malloc(bytes), kPoison, bytes);
  std::set<Queue*> users = {};  // further streams, by record_stream
  vector<Past> history = {};
  ~Block() { std::free(data); }
};

struct Mark {  // one recording of an event
  Queue* queue;
  uint64_t position;
  Clock clock;
  std::chrono::steady_clock::time_point time;  // of the recording, which is eager's time of running
};

struct Task { string name; std::function<void()> work; vector<Access> accesses; optional<Mark> after; };

struct Queue {
  int device;
  size_t index;
  uint64_t num_queued = 0, num_done = 0;
  std::deque<Task> tasks = {};
  Clock clock = {};
  string name() const { return c10::str("stream ", index, " of device ", device); }
};

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Machine {
  std::deque<Queue> queues;  // for each device the default stream, for each the allocator's, all others
  string policy = "eager", error;
  std::mt19937_64 random;
  Clock host;
  vector<string> reports;
  std::set<const void*> pinned;
  std::array<Stats, kNumDevices> stats;
  vector<Generator> generators;

  Machine() {
    for (int i = 0; i < 2 * kNumDevices; ++i) add(i % kNumDevices);
    for (int i = 0; i < kNumDevices; ++i) generators.push_back(at::detail::createCPUGenerator());
  }
  Queue& add(int device) { return queues.emplace_back(Queue{device, queues.size()}); }

  void enqueue(Queue& queue, Task task) {
    const Lock lock;
    queue.tasks.push_back(std::move(task));
    ++queue.num_queued;
    if (policy == "eager") run(queue);
    if (policy == "random" && random() % 20 == 0) run(queues[random() % queues.size()]);
  }

  void run(Queue& queue, uint64_t position = UINT64_MAX) {
    while (queue.num_done < position && !queue.tasks.empty()) {
      if (auto after = queue.tasks[0].after) run(*after->queue, after->position);
      step(queue);
    }
  }

  void step(Queue& queue) {
    const Task task = std::move(queue.tasks[0]);
    queue.tasks.pop_front();
    if (task.after) join(queue.clock, task.after->clock);
    join(queue.clock, host);
    queue.clock.resize(queues.size());
    ++queue.clock[queue.index];
    if (policy == "eager") for (const auto& access : task.accesses) check(queue, task.name, access);
    try {
      if (task.work) task.work();
    } catch (const std::exception& exception) {
      if (error.empty()) error = c10::str(task.name, " on ", queue.name(), ": ", exception.what());
    }
    ++queue.num_done;
  }

  void check(const Queue& queue, const string& name, const Access& now) {
    if (!now.block) return;
    auto& history = now.block->history;
    for (const auto& past : history)
      if (past.begin < now.end && now.begin < past.end && (past.writes || now.writes) &&
          queue.clock[past.queue] < past.tick)
        reports.push_back(c10::str(
            name, " on ", queue.name(), now.writes ? " writes" : " reads", " what ", past.name, " on ",
            queues[past.queue].name(), past.writes ? " writes" : " reads", ", and does not wait for it"));
    std::erase_if(history, [&](const Past& past) {  // who waits for this access waits for those, too
      return now.begin <= past.begin && past.end <= now.end &&
          (now.writes || (!past.writes && past.queue == queue.index));
    });
    history.push_back({queue.index, queue.clock[queue.index], now.begin, now.end, now.writes, name});
  }

  Mark record(Queue& queue) {
    const Lock lock;
    return {&queue, queue.num_queued, queue.clock, std::chrono::steady_clock::now()};
  }
  void wait(Queue& queue, const Mark& mark) { enqueue(queue, {"wait", {}, {}, mark}); }

  void synchronize(const Mark& mark) {
    const Lock lock;
    run(*mark.queue, mark.position);
    join(host, mark.clock);
    TORCH_CHECK(error.empty(), std::exchange(error, ""));
  }

  bool query(const Mark& mark) {
    const Lock lock;
    const bool done = mark.queue->num_done >= mark.position;
    if (done) join(host, mark.clock);
    run(*mark.queue, mark.position);  // who asks again and again must see an end
    return done;
  }
};
Machine& machine = *new Machine;  // some tensors outlive everything

// ---- Devices, streams, allocators ----

thread_local int current_device = 0;
thread_local std::array<int64_t, kNumDevices> current_streams{};

Device device_at(int index) { return {kOurs, static_cast<DeviceIndex>(index)}; }
int index_of(Device device) {
  TORCH_CHECK(device.index() < kNumDevices, device, " is not there, only ", kNumDevices, " devices are.");
  return device.has_index() ? device.index() : current_device;
}
Stream stream_at(int device, int64_t id) { return Stream(Stream::UNSAFE, device_at(device), id); }
Stream current_stream(Device of) { return stream_at(index_of(of), current_streams[index_of(of)]); }
Queue& queue_of(Stream stream) {  // by convention, each device's default stream is 0
  const Lock lock;
  return machine.queues.at(stream.id() ? stream.id() : stream.device_index());
}
Queue& current_queue(Device of) { return queue_of(current_stream(of)); }

// As with a caching allocator, the stream that allocated a block may use it for something else from now on: it
// poisons it. If other streams were recorded, the allocator waits for all of them first.
void free_block(void* context) {
  const Lock lock;
  const std::unique_ptr<Handle> handle(static_cast<Handle*>(context));
  const Handle block = *handle;
  Queue* queue = block->owner;
  if (!queue) { machine.pinned.erase(block->data); return; }
  machine.stats[queue->device].allocated_bytes[0].decrease(block->bytes);
  if (!block->users.empty()) {
    queue = &machine.queues[kNumDevices + queue->device];
    queue->clock.clear();  // its earlier waits do not count for this block
    machine.wait(*queue, machine.record(*block->owner));
    for (auto user : block->users) machine.wait(*queue, machine.record(*user));
  }
  const auto poison = [block] { std::memset(block->data, kPoison, block->bytes); };
  machine.enqueue(*queue, {"free", poison, {{block, 0, block->bytes, true}}});
}

Handle block_of(const DataPtr& pointer) {  // none for pageable memory
  auto handle = pointer.cast_context<Handle>(&free_block);
  return handle ? *handle : nullptr;
}
Handle block_of(const Tensor& tensor) { return block_of(tensor.storage().data_ptr()); }

void record_use(const DataPtr& pointer, Stream stream) {
  const Lock lock;
  auto block = block_of(pointer);
  if (block && block->owner != &queue_of(stream)) block->users.insert(&queue_of(stream));
}

struct Allocator final : c10::DeviceAllocator {
  const bool pins;
  explicit Allocator(bool pins) : pins(pins) {}
  DataPtr allocate(size_t bytes) override {
    const Lock lock;
    const Device device = pins ? Device(c10::kCPU) : device_at(current_device);
    if (bytes == 0) return {nullptr, device};
    const auto handle = new Handle(new Block{bytes, pins ? nullptr : &current_queue(device)});
    if (pins) machine.pinned.insert((*handle)->data);
    else allocated_bytes(current_device).increase(bytes);
    return {(*handle)->data, handle, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  void recordStream(const DataPtr& pointer, Stream stream) override { record_use(pointer, stream); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingAllocator::Stat& allocated_bytes(int of) { return machine.stats.at(of).allocated_bytes[0]; }
  Stats getDeviceStats(DeviceIndex of) override { return machine.stats.at(of); }
  void resetAccumulatedStats(DeviceIndex of) override { allocated_bytes(of).reset_accumulated(); }
  void resetPeakStats(DeviceIndex of) override { allocated_bytes(of).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex of) override {
    return {kDeviceBytes - allocated_bytes(of).current, kDeviceBytes};
  }
} device_allocator(false), pinned_allocator(true);

// ---- Operators: rehearsed at the call on zeros, for layouts and errors, and then enqueued ----

bool is_ours(const Tensor& tensor) { return tensor.device().type() == kOurs; }

Storage new_storage(size_t bytes, at::Allocator* allocator) {
  return Storage(Storage::use_byte_size_t(), bytes, allocator, true);
}
Tensor laid_out(Storage storage, DispatchKeySet keys, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}
Tensor zeros_on_cpu(const Tensor& ours) {
  const auto storage = new_storage(ours.storage().nbytes(), c10::GetAllocator(c10::kCPU));
  std::memset(storage.mutable_data(), 0, storage.nbytes());
  return laid_out(storage, kCpuKeys, ours);
}
Tensor on_cpu(const Tensor& ours) {  // the same bytes, which live as long as this does, even if freed
  const auto handle = new Handle(block_of(ours));
  const auto drop = [](void* held) { delete static_cast<Handle*>(held); };
  DataPtr data(*handle ? (*handle)->data : nullptr, handle, drop, c10::kCPU);
  Storage storage(Storage::use_byte_size_t(), ours.storage().nbytes(), std::move(data));
  return laid_out(std::move(storage), kCpuKeys, ours);
}
Access access(const Tensor& of, bool writes) {
  const size_t size = of.element_size(), begin = size * of.storage_offset();
  const auto end = at::detail::computeStorageNbytes(of.sizes(), of.strides(), size, of.storage_offset());
  return {block_of(of), begin, end, writes};
}

using Visit = std::function<Tensor(const Tensor&)>;
IValue with_each(const IValue& value, const Visit& visit) {  // each tensor in it replaced
  if (value.isDevice()) return Device(c10::kCPU);
  if (value.isTensor() && value.toTensor().defined()) return visit(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) list.set(i, with_each(list.get(i), visit));
  return list;
}
Stack with_each(Stack values, const Visit& visit) {
  for (auto& value : values) value = with_each(value, visit);
  return values;
}

// The device of all of them. Numbers and indexes may come from the CPU, and count as they are now.
Device settle(const string& name, Stack& arguments) {
  optional<Device> device;
  for (auto& value : arguments) {
    if (value.isDevice()) device = value.toDevice();
    value = with_each(value, [&](const Tensor& tensor) {
      const bool may_differ = tensor.is_cpu() && (tensor.dim() == 0 || value.isOptionalTensorList());
      TORCH_CHECK(may_differ || device.value_or(tensor.device()) == tensor.device(), name, " has got tensors of ",
                  tensor.device(), " and of ", *device);
      if (!may_differ) device = tensor.device();
      if (!may_differ || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;  // no-one writes there
      return tensor.clone();
    });
  }
  return device_at(index_of(device.value()));
}

bool needs_values(const OperatorHandle& op, const Stack& arguments) {  // to know what it returns
  bool needs = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (const auto& result : op.schema().returns())
    needs |= !result.type()->cast<c10::TensorType>() && !result.type()->cast<c10::ListType>();
  for (const auto& value : arguments)
    if (value.isOptionalTensorList()) with_each(value, [&](const Tensor& index) {
      needs |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;  // a mask
      return index;
    });
  return needs;
}

// Kernels stand below autograd, autocast and Python; a task runs in any thread, and must stand there, too.
struct Below {
  const DispatchKeySet all{DispatchKeySet::FULL}, backends{DispatchKeySet::FULL_AFTER, DispatchKey::Python};
  c10::impl::ForceDispatchKeyGuard guard{DispatchKeySet(DispatchKey::BackendSelect), all - backends};
};
Stack called(const OperatorHandle& op, Stack stack) {
  const Below below;
  op.redispatchBoxed(kCpuKeys, &stack);
  return stack;
}

void take_layout(const Tensor& ours, const Tensor& cpu) {  // an `out` may have got another size
  if (ours.sizes() == cpu.sizes() && ours.strides() == cpu.strides()) return;
  auto* impl = ours.unsafeGetTensorImpl();
  const auto bytes = cpu.storage().nbytes();
  if (bytes > ours.storage().nbytes()) impl->set_storage_keep_dtype(new_storage(bytes, &device_allocator));
  impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
}

using Lent = vector<std::pair<Tensor, Tensor>>;  // ours, and what stands for it on the CPU

Stack rehearsed(const OperatorHandle& op, Stack& arguments, Device device, bool at_once, Lent& lent) {
  // This moves the device's generator on; the task draws the same, from where the generator was.
  const auto place = op.schema().argumentIndexWithName("generator");
  if (place && arguments[*place].isNone()) arguments[*place] = machine.generators[device.index()];
  const auto before = place ? arguments[*place].toGenerator().clone() : Generator();
  auto results = called(op, with_each(arguments, [&](const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    return lent.emplace_back(tensor, at_once ? on_cpu(tensor) : zeros_on_cpu(tensor)).second;
  }));
  if (place) arguments[*place] = before;
  for (const auto& [ours, cpu] : lent) take_layout(ours, cpu);
  return results;
}

Tensor returned(const Tensor& result, const Lent& lent) {  // an argument, or a new tensor
  for (const auto& [ours, cpu] : lent) if (cpu.is_same(result)) return ours;
  return laid_out(new_storage(result.storage().nbytes(), &device_allocator), kOurKeys, result);
}

void run_operator(const OperatorHandle& op, Stack* stack) {
  const Lock lock;
  const auto& schema = op.schema();
  auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const auto device = settle(schema.name(), arguments);
  const c10::DeviceGuard guard(device);
  Queue& queue = current_queue(device);
  const bool at_once = needs_values(op, arguments);
  if (at_once) machine.synchronize(machine.record(queue));
  Lent lent;
  auto results = rehearsed(op, arguments, device, at_once, lent);

  vector<Access> accesses;
  vector<Storage> outputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    arguments[i] = with_each(arguments[i], [&](const Tensor& tensor) {
      accesses.push_back(access(tensor, alias && alias->isWrite()));
      return is_ours(tensor) ? on_cpu(tensor) : tensor;
    });
  }
  for (const auto& result : results)
    stack->push_back(with_each(result, [&](const Tensor& cpu) {
      const auto ours = returned(cpu, lent);
      accesses.push_back(access(ours, true));
      outputs.push_back(on_cpu(ours).storage());
      return ours;
    }));
  if (!at_once) results.clear();
  machine.enqueue(queue, {schema.name(), [=] {
    size_t i = 0;
    with_each(at_once ? results : called(op, arguments), [&](const Tensor& result) {
      const auto &from = result.storage(), &to = outputs.at(i++);
      TORCH_CHECK(from.nbytes() == to.nbytes(), "The layout of its result depends on values.");
      if (from.data() != to.data()) std::memcpy(to.mutable_data(), from.data(), from.nbytes());
      return result;
    });
  }, accesses});
}

void run_any_operator(const OperatorHandle& op, Stack* stack) {
  const auto& [name, returns] = std::tie(op.schema().name(), op.schema().returns());
  const bool is_view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  const bool needs_no_bytes = is_view || name == "aten::set_" || name == "aten::is_set_to";
  if (needs_no_bytes) op.redispatchBoxed(kCpuKeys, stack);  // any device will do
  else run_operator(op, stack);
}

OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
void run_convolution(const OperatorHandle&, Stack* stack) { run_operator(find("aten::convolution"), stack); }
void run_convolution_backward(const OperatorHandle&, Stack* stack) {
  const auto grad_output = stack->at(stack->size() - 10).toTensor();
  stack->insert(stack->end() - 7, IValue(vector<int64_t>{grad_output.size(1)}));  // the size of a bias
  run_operator(find("aten::convolution_backward"), stack);
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), input.new_ones(input.sizes(), at::kBool)};
  const auto mask = input.new_empty(input.sizes(), at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// As on CUDA. Between devices, the source's stream copies: first it and the target's wait for each other, and at
// the end the target's waits for it. With the host, only pinned memory is read or written when the task runs.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Lock lock;
  const bool pinned = block_of(is_ours(from) ? to : from) && !(is_ours(from) && is_ours(to));
  const bool waits = !(is_ours(from) && is_ours(to)) && !(non_blocking && (pinned || is_ours(to)));
  Queue& queue = current_queue((is_ours(from) ? from : to).device());
  Queue& target = current_queue((is_ours(to) ? to : from).device());
  const auto source = from.expand_as(to);
  const auto read = is_ours(from) || (pinned && non_blocking) ? on_cpu(source) : source.clone();
  const auto written = is_ours(to) || pinned ? on_cpu(to) : to;
  if (&queue != &target) machine.wait(queue, machine.record(target));
  machine.enqueue(queue, {"copy", [=] { const Below below; written.copy_(read); },
                          {access(source, false), access(to, true)}});
  if (&queue != &target) machine.wait(target, machine.record(queue));
  if (waits) machine.synchronize(machine.record(queue));
  return to;
}

Tensor empty(at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, kOurKeys, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<Device> device, optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kOurKeys, type);
}
void record_stream(Tensor& tensor, Stream stream) { record_use(tensor.storage().data_ptr(), stream); }

// ---- What torch asks of a backend, and the tests' controls ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Mark& mark(void* event) { return *static_cast<Mark*>(event); }
  c10::DeviceType type() const override { return kOurs; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Device getDevice() const override { return device_at(current_device); }
  void setDevice(Device to) const override { current_device = index_of(to); }
  void uncheckedSetDevice(Device to) const noexcept override { current_device = to.index(); }
  Device exchangeDevice(Device to) const override { return device_at(std::exchange(current_device, index_of(to))); }
  Stream getStream(Device of) const override { return current_stream(of); }
  Stream getDefaultStream(Device of) const override { return stream_at(index_of(of), 0); }
  Stream getNewStream(Device of, int) const override {
    const Lock lock;
    return stream_at(index_of(of), machine.add(index_of(of)).index);
  }
  Stream exchangeStream(Stream to) const override {
    return stream_at(to.device_index(), std::exchange(current_streams.at(to.device_index()), to.id()));
  }
  bool queryStream(const Stream& stream) const override { return machine.query(machine.record(queue_of(stream))); }
  void synchronizeStream(const Stream& of) const override { machine.synchronize(machine.record(queue_of(of))); }
  void synchronizeDevice(DeviceIndex of) const override {
    const Lock lock;
    for (auto& queue : machine.queues) if (queue.device == of) machine.synchronize(machine.record(queue));
  }
  void record(void** event, const Stream& stream, DeviceIndex index, c10::EventFlag) const override {
    TORCH_CHECK(index < 0 || index == stream.device_index(), "An event of device ", int(index),
                " cannot be recorded on ", stream);  // nor can one of CUDA
    if (!*event) *event = new Mark;
    mark(*event) = machine.record(queue_of(stream));
  }
  void block(void* event, const Stream& stream) const override { machine.wait(queue_of(stream), mark(event)); }
  bool queryEvent(void* event) const override { return machine.query(mark(event)); }
  void synchronizeEvent(void* event) const override { machine.synchronize(mark(event)); }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(mark(second).time - mark(first).time).count();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete &mark(event); }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override { record_use(data, stream); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { const Lock lock; return machine.pinned.count(data); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_any_operator>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
  m.impl("native_dropout", &dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
}
TORCH_LIBRARY(deferred, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kOurs, &device_allocator);
  m.def("set_policy", [](string policy, int64_t seed) {
    const Lock lock;
    for (auto& queue : machine.queues) machine.run(queue);
    machine.policy = policy;
    machine.random.seed(seed);
  });
  m.def("take_reports", [] { const Lock lock; return std::exchange(machine.reports, {}); });
  m.def("default_generator", [](int64_t device) { return machine.generators.at(device); });
}

}  // namespace
