"""Slots of adapters: who runs pins one, who finds none waits, and nobody is forgotten."""

from msgspec.structs import replace

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from workers.adapters.ref import AdapterRef
from workers.scheduler.adapter_memory import MAX_OVERTAKING

NUM_SLOTS = 2


def ref(name):
    return AdapterRef(name, f"/adapters/{name}", f"key of {name}")


def request(request_id, adapter="", num_tokens=3, prompt=(3, 4, 5)):
    made = make_request(request_id, list(prompt), max_tokens=num_tokens)
    return replace(made, adapter=ref(adapter)) if adapter else made


def make_driver(is_overlapped=False, **changes):
    return Driver(make_config(num_adapter_slots=NUM_SLOTS, **changes), is_overlapped)


class Device:
    """What plans say of adapters, carried out."""

    def __init__(self):
        self.slots = {}
        self.worn = {}
        self.num_loads = 0

    def run(self, plan):
        """The adapter of every row."""
        for slot in plan.adapters.bare:
            self.worn.pop(slot, None)
        for load in plan.adapters.loads:
            self.slots[load.slot] = load.adapter.name
            self.num_loads += 1
        self.worn |= {one.request_slot: one.slot for one in plan.adapters.worn}
        return [self.slots[self.worn[slot]] if slot in self.worn else "" for slot in plan.slots]


def run_to_end(driver, max_steps=1000):
    for _ in range(max_steps):
        if not driver.scheduler.has_work:
            return
        driver.step()
    raise AssertionError("requests are left")


def test_rows_wear_what_their_requests_ask_for() -> None:
    driver, device = make_driver(), Device()
    driver.submit(request("a", "one"), request("b"), request("c", "two"), request("d", "one"))
    run_to_end(driver)
    assert device.run(driver.plans[0]) == ["one", "", "two", "one"]
    assert all(device.run(plan) == ["one", "", "two", "one"] for plan in driver.plans[1:])
    assert device.num_loads == 2


def test_who_finds_no_slot_waits_and_keeps_nobody_else_waiting() -> None:
    driver, device = make_driver(), Device()
    driver.submit(*(request(name, name) for name in ("one", "two", "three")), request("base"))
    run_to_end(driver)
    assert device.run(driver.plans[0]) == ["one", "two", ""]
    assert [device.run(plan) for plan in driver.plans[1:]][-1] == ["three"]
    assert {outputs[-1].finish_reason for outputs in driver.outputs.values()} == {"length"}


def test_many_adapters_take_turns_and_lose_nobody() -> None:
    driver, device = make_driver(is_overlapped=True, max_running_requests=5), Device()
    names = [f"adapter-{index}" for index in range(20)]
    driver.submit(*(request(f"{name}/{turn}", name) for turn in range(2) for name in names))
    run_to_end(driver)
    worn = [name for plan in driver.plans for name in device.run(plan)]
    assert set(worn) == set(names)
    assert all(len(outputs) == 3 for outputs in driver.outputs.values())


def test_an_idle_adapter_stays_until_its_slot_is_needed() -> None:
    driver, device = make_driver(), Device()
    for name in ("one", "two", "one", "two", "three", "two", "one"):
        driver.submit(request(f"{len(driver.plans)}", name))
        run_to_end(driver)
    for plan in driver.plans:
        device.run(plan)
    # one, two, three in place of one, then one in place of three.
    assert device.num_loads == 4


def test_those_whose_adapter_is_there_do_not_overtake_for_ever() -> None:
    driver = make_driver(max_running_requests=2, max_waiting_requests=1000)
    driver.submit(request("hot-0", "hot"), request("warm-0", "warm"), request("cold", "cold"))
    for turn in range(1, 2 * MAX_OVERTAKING):
        driver.submit(request(f"hot-{turn}", "hot"), request(f"warm-{turn}", "warm"))
        driver.step()
        driver.step()
        if driver.outputs["cold"]:
            break
    assert turn <= MAX_OVERTAKING + 4
    run_to_end(driver)


def test_an_abort_frees_the_slot_and_the_place_in_the_queue() -> None:
    driver = make_driver()
    driver.submit(*(request(name, name, num_tokens=20) for name in ("one", "two", "three", "four")))
    driver.step()
    assert driver.scheduler.abort("three")
    assert driver.scheduler.abort("one")
    driver.step()
    driver.step()
    assert driver.outputs["four"]
    run_to_end(driver)


def test_retracted_requests_find_their_adapter_again() -> None:
    config = make_config(num_adapter_slots=NUM_SLOTS, page_size=4, num_pages=9, max_context_len=33)
    driver, device = Driver(config, has_reserve=False), Device()
    names = ("one", "two", "three")
    driver.submit(*(request(name, name, 20, prompt=range(3, 9)) for name in names))
    run_to_end(driver)
    assert driver.scheduler.stats().num_preemptions > 0
    assert {name for plan in driver.plans for name in device.run(plan)} == set(names)
    assert all(len(outputs) == 20 for outputs in driver.outputs.values())


def test_pages_are_shared_within_an_adapter_only() -> None:
    driver = make_driver()
    prompt = range(3, 15)
    for request_id, adapter in (("a", "one"), ("b", "two"), ("c", ""), ("d", "one")):
        driver.submit(request(request_id, adapter, prompt=prompt))
        run_to_end(driver)
    cached = {name: outputs[0].num_cached_tokens for name, outputs in driver.outputs.items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "d": 8}
