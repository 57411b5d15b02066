"""No rpc and no field of proto/*.proto goes untested: a drift of the contract would go unnoticed there."""

from tests.conformance.over_grpc.coverage import NEVER_SET, contract, table


def test_every_rpc_and_every_field_is_exercised():
    assert sorted(contract() - table().keys() - NEVER_SET.keys()) == []


def test_the_table_names_only_what_exists():
    assert sorted((table().keys() | NEVER_SET.keys()) - contract()) == []


def test_what_can_be_exercised_is_not_excused():
    assert sorted(NEVER_SET.keys() & table().keys()) == []
