#!/usr/bin/env bash
# Pass the tests of rdma in virtual machines that have a device for it: in one, then between two.
#
#   scripts/test_rdma.sh [ARGUMENT OF PYTEST…]
#
# RDMA_TESTS_GUESTS=1 leaves out the tests between two.
# There a missing device is a failure, so that nothing passes by being skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

export HALFMOON_TESTS_NEED_RDMA=1
pytest=(.venv/bin/python -m pytest -p no:cacheprovider --color=no -q --durations 5)

echo "test_rdma: in one guest"
RDMA_VM_LIMIT_S=${RDMA_VM_LIMIT_S:-1500} \
  scripts/rdma_vm.sh "${pytest[@]}" tests/rdma tests/contract/test_transport_reads.py -k "rdma" "$@"

[ "${RDMA_TESTS_GUESTS:-2}" -ge 2 ] || exit 0
echo "test_rdma: between two guests"
export RDMA_TESTS_OTHER_MACHINE=10.99.0.2
RDMA_VM_MEMORY=${RDMA_VM_MEMORY:-2G} RDMA_VM_CPUS=1 \
  scripts/rdma_vm.sh --peer "PYTHONPATH=tests .venv/bin/python -m support.rdma_guest 10.99.0.2" \
  "${pytest[@]}" tests/rdma/test_rdma_guests.py
