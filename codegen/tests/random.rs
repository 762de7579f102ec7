//! Invariants of fusion and planning on random graphs, under profiles that divide the work in different ways.

mod common;

use common::check;
use meganeura_codegen::saturate::Limits;
use meganeura_codegen::{CompileOptions, DeviceProfile, compile};
use meganeura_ir::testing::random_graph;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn programs_of_random_graphs_keep_the_invariants(
        sizes in prop::sample::select(vec![[2, 3], [5, 33], [17, 20]]),
        choices in prop::collection::vec(any::<[u8; 4]>(), 1..20),
        saturated in any::<bool>(),
    ) {
        let graph = random_graph(sizes, &choices).verify().expect("random graphs are valid");
        let saturate = saturated.then_some(Limits { nodes: 3000, iterations: 6 });
        let options = CompileOptions { saturate, memory_limit: None };
        for profile in [DeviceProfile::generic(), DeviceProfile::software(), DeviceProfile::apple()] {
            for max_storage_bindings in [4, 8, 16, 31] {
                let profile = DeviceProfile { max_storage_bindings, ..profile.clone() };
                let compiled = compile(&graph, &profile, &options);
                let compiled = compiled.unwrap_or_else(|e| panic!("{max_storage_bindings} bindings: {e}\n{}", *graph));
                check(&compiled.program, &profile);
            }
        }
    }
}
