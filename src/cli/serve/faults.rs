//! A server whose device fails answers 503, and then works again.

#[path = "../../../tests/common/http.rs"]
mod http;

use std::sync::Arc;

use http::{answer, post, tensor};
use meganeura::live::{DeviceSource, Live, LiveOptions, LiveTraining};
use meganeura::runtime::fault::{Fault, Site};
use meganeura::{Bindings, DType, DeviceSelector, Tensor};
use meganeura_serve::{Options, Progress, RefusalKind, Served, Server, TrainJob, Wake};
use serde_json::{Value, json};

use super::served::{LiveModel, LoadError};

fn model(name: &str, devices: &Arc<DeviceSource>) -> Result<LiveModel, LoadError> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/digits-cnn.onnx");
    let options = LiveOptions { training: Some(LiveTraining::default()), ..LiveOptions::default() };
    LiveModel::new(name.into(), Live::open(path, options, devices.clone())?, &Bindings::default(), devices, 1)
}

#[test]
fn a_job_whose_device_an_inference_loses_is_over() {
    let devices = Arc::new(DeviceSource::new(DeviceSelector::Auto));
    let mut model = model("a", &devices).unwrap();
    let image = |samples: usize| Tensor::from_f32([samples, 1, 8, 8], &vec![0.5; samples * 64]);
    let job = || TrainJob {
        inputs: vec![("image".into(), image(2))],
        targets: Some(Tensor::from_i64(DType::I64, [2], &[3, 8])),
        loss: "cross_entropy".into(),
        output: None,
        optimizer: "sgd".into(),
        learning_rate: 0.1,
        steps: 3,
    };
    let (sender, woken) = std::sync::mpsc::channel();
    let wake: Wake = Arc::new(move || sender.send(()).unwrap());
    let advance = |model: &mut LiveModel| loop {
        match model.train(&wake) {
            Ok(Progress::Waits) => woken.recv().unwrap(),
            progress => break progress,
        }
    };
    model.begin_training(job()).unwrap();
    assert!(matches!(advance(&mut model), Ok(Progress::Continues { loss: Some(_) })));
    devices.current().unwrap().inject(Site::Submission, 0, Fault::Lost);
    model.run(&[image(1)]).unwrap_err();
    assert!(model.may_train(true));
    assert_eq!(advance(&mut model).unwrap_err().kind, RefusalKind::Unavailable);

    model.begin_training(job()).unwrap();
    let outcome = loop {
        if let Progress::Done(outcome) = advance(&mut model).unwrap() {
            break outcome;
        }
    };
    assert_eq!((outcome.published, outcome.weight_version), (true, 1));
}

#[test]
fn a_device_that_fails_is_503_and_the_next_request_works() {
    let devices = Arc::new(DeviceSource::new(DeviceSelector::Auto));
    let shared = devices.clone();
    let load = move || {
        let models = ["a", "b"].map(|name| Ok(Box::new(model(name, &shared)?) as Box<dyn Served>));
        models.into_iter().collect::<Result<Vec<_>, LoadError>>()
    };
    let options = Options { listen: ([127, 0, 0, 1], 0).into(), max_train_steps: 100, ..Options::default() };
    let server = Server::start(options, Box::new(load)).map_err(|e| e.to_string()).unwrap();
    let (address, stop) = (server.addresses()[0].to_string(), server.stopper());
    let serving = std::thread::spawn(move || server.run());

    let images = |samples: usize| tensor("image", "FP32", &[samples, 1, 8, 8], (0..samples * 64).map(|i| (i % 7) as f64));
    let infer = |model: &str| post(&address, &format!("/v2/models/{model}/infer"), &json!({ "inputs": [images(1)] })).unwrap();
    let labels = tensor("label", "INT64", &[2], [3.0, 8.0]);
    let job =
        |steps: u64| json!({ "inputs": [images(2)], "targets": labels, "loss": "cross_entropy", "lr": 0.1, "steps": steps });
    let train = |steps: u64| post(&address, "/v2/models/a/train", &job(steps)).unwrap();
    let refused = |(status, body): (u16, Value), word: &str| {
        assert_eq!(status, 503, "{body}");
        assert!(body["error"].as_str().unwrap().contains(word), "{body}");
    };

    assert_eq!(train(2).0, 200);
    let [a, b] = ["a", "b"].map(|model| answer(&infer(model).1));
    assert_eq!((a.1, b.1), (1, 0));
    for (fault, word) in [(Fault::Lost, "lost"), (Fault::OutOfMemory, "memory")] {
        for site in [Site::Submission, Site::Wait] {
            devices.current().unwrap().inject(site, 0, fault);
            refused(infer("a"), word);
            assert_eq!(answer(&infer("a").1), a);
            assert_eq!(answer(&infer("b").1), b);
            devices.current().unwrap().inject(site, 5, fault);
            refused(train(20), word);
            assert_eq!(answer(&infer("a").1), a);
        }
    }
    let (status, report) = train(1);
    assert_eq!((status, &report["weight_version"]), (200, &json!(2)), "{report}");
    stop.stop();
    serving.join().unwrap().unwrap();
}
