# The two commands: `make train` and `make test`. Everything is built by CMake; this file is thin.
# `make` gets what is missing (scripts/deps.sh) and leaves the program at build/dropless.
# `make CC=clang` builds with another compiler (until the next CC=, or make clean).
# `make install PREFIX=/usr/local` installs, `make package` leaves a Debian package in build/.
MAKEFLAGS += --no-print-directory
PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
FUZZ_SECONDS ?= 10
CONFIG ?= configs/shakespeare.yml
RUN ?= runs/shakespeare
# Only a compiler that was asked for is passed on; CMake starts afresh when it changes.
COMPILER := $(if $(filter command environment,$(firstword $(origin CC))),-DCMAKE_C_COMPILER=$(CC))
# gcc's ThreadSanitizer needs the old memory map on kernels that randomize more bits.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

all: deps
	cmake --preset release $(COMPILER)
	cmake --build build -j $(JOBS)

deps:
	@scripts/deps.sh build

deps-test:
	@scripts/deps.sh build test

train: all
	build/dropless train $(CONFIG) $(ARGS)
	@printf '\nA sample of what it learned:\n\nROMEO:'
	@build/dropless generate $(RUN) --prompt "ROMEO:" --tokens 240 --temperature 0.8 --seed 1
	@echo

test: deps-test
	cmake --preset release -DDPL_TESTS=ON $(COMPILER)
	cmake --build build -j $(JOBS)
	ctest --preset release

asan tsan clang: deps-test
	cmake --preset $@
	cmake --build build/$@ -j $(JOBS)
	$(if $(filter tsan,$@),$(NO_ASLR)) ctest --preset $@

# Each fuzzer runs for a short time from the seeds in tests/corpus/NAME, where there are any.
fuzz: deps-test
	cmake --preset fuzz
	cmake --build build/fuzz -j $(JOBS) --target fuzzers
	scripts/fuzz.sh build/fuzz $(FUZZ_SECONDS)

# Takes a few minutes, and is worth something only while nothing else runs.
bench: all
	build/dropless bench report docs/performance.md

install: all
	cmake --install build --prefix $(PREFIX)

package: deps
	@scripts/deps.sh package
	cmake --preset release $(COMPILER)
	cmake --build build -j $(JOBS)
	cd build && cpack -G DEB

clean:
	rm -rf build

.PHONY: all deps deps-test train test asan tsan clang fuzz bench install package clean
