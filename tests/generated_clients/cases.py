"""Further cases for the example in Python."""

import os

from add_plant import Rejected, add, client
from plant_store import AuthenticatedClient
from plant_store.models import NewPlant


def rejection(plant, client=client):
    try:
        add(client, plant)
    except Rejected as error:
        return str(error)
    raise AssertionError(f"{plant} was accepted")


fern = NewPlant(id=1, name="Fern")
for _ in range(2):
    assert add(client, fern).to_dict() == {"name": "Fern"}
assert rejection(NewPlant(id=1, name="Another")) == "400, error 40009"
assert rejection(NewPlant(id="one", name="Fern")) == "400, error 40002"
assert rejection(NewPlant(id=2**63, name="Fern")) == "400, error 40002"
stranger = AuthenticatedClient(base_url=os.environ["PLANTSTORE_URL"], token="plant_unknown")
assert rejection(fern, stranger) == "401, error 40101"
