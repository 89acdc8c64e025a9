from normkit.environment import cpu_model, describe_environment, installed_extras


def test_only_what_concerns_memory_is_taken_from_the_environment():
    environ = {"MALLOC_ARENA_MAX": "1", "TCMALLOC_X": "2", "LD_PRELOAD": "libjemalloc.so", "HOME": "/", "XMALLOC_": "3"}
    assert describe_environment(environ)["allocator"] == {
        "LD_PRELOAD": "libjemalloc.so",
        "MALLOC_ARENA_MAX": "1",
        "TCMALLOC_X": "2",
    }


def test_the_cpu_has_a_name_wherever_it_is_told(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nprocessor\t: 1\nmodel name\t: Some CPU @ 2 GHz\n"
    )
    assert cpu_model(cpuinfo) == "Some CPU @ 2 GHz"
    cpuinfo.write_text("processor\t: 0\n")
    assert cpu_model(cpuinfo)
    assert cpu_model(tmp_path / "absent")


def test_extras_are_those_that_the_package_declares():
    assert {"lab", "export", "ray"} <= installed_extras().keys()
    declared = [
        "torch>=2.7",
        "numpy>=1 ; extra == 'one'",
        'no-such_package; extra == "two"',
        "rich; python_version < '4'",
    ]
    found = installed_extras(declared)
    assert found["one"]["numpy"]
    assert found["two"] == {"no-such_package": None}
    assert found.keys() == {"one", "two"}
