// Further cases for the example in Go.

package main

import (
	"os"
	"strings"
	"testing"
)

func TestFurtherCases(t *testing.T) {
	fern := NewPlant{ID: 1, Name: "Fern"}
	for round := 0; round < 2; round++ {
		if err := add(fern); err != nil {
			t.Fatal(err)
		}
	}
	isRejected(t, NewPlant{ID: 1, Name: "Another"}, `"error":40009`)
	isRejected(t, NewPlant{ID: 1, Name: strings.Repeat("x", 2<<20)}, `"error":40013`)
	os.Setenv("PLANTSTORE_TOKEN", "plant_unknown")
	isRejected(t, fern, `"error":40101`)
}

func isRejected(t *testing.T, plant NewPlant, code string) {
	err := add(plant)
	if err == nil || !strings.HasPrefix(err.Error(), "rejected: 4") || !strings.Contains(err.Error(), code) {
		t.Errorf("%.20s: the error is %v, not %s", plant.Name, err, code)
	}
}
