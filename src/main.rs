//! The `landline` program: reads the command line and the settings, starts the logs, and runs what was asked for.

use std::process::ExitCode;

use landline::{
    app::{
        self,
        cli::{Arguments, Command},
    },
    settings::{Loaded, Wrong},
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code for a wrong command line or setting, as clap's own.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let arguments = Arguments::read();
    let done = match arguments.command() {
        Command::Serve => with_settings(&arguments, |loaded| {
            app::logs::start(&loaded.settings);
            app::serve(loaded.settings)
        }),
        Command::CheckConfig => with_settings(&arguments, |loaded| app::cli::print(&loaded)),
        Command::Healthcheck(check) => with_settings(&arguments, |loaded| app::healthcheck::run(&check, &loaded.settings)),
        Command::Keys(command) => with_settings(&arguments, |loaded| app::keys::run(&command, &loaded.settings)),
        Command::Inspect(asked) => with_settings(&arguments, |loaded| app::cli::inspect(&asked, &loaded.settings)),
        Command::Apply(apply) => match app::apply::run(&apply) {
            Ok(code @ 1..) => return ExitCode::from(code),
            done => Ok(done.map(drop)),
        },
        Command::Reset(reset) => match app::reset::run(&reset) {
            Ok(code @ 1..) => return ExitCode::from(code),
            done => Ok(done.map(drop)),
        },
        Command::Wait(wait) => with_settings(&arguments, |loaded| app::wait::run(&wait, &loaded.settings)),
        Command::Import(import) => Ok(app::import::run(&import)),
        Command::Mirror(options) => Ok(app::mirror::run(&options)),
        Command::Bench(options) => Ok(app::cli::run_bench(&options)),
        Command::Floor => with_settings(&arguments, |loaded| app::floor::serve(&loaded.settings)),
    };
    match done {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("landline: {error}");
            ExitCode::FAILURE
        }
        Err(wrong) => {
            wrong.iter().for_each(|line| eprintln!("landline: {line}"));
            ExitCode::from(USAGE)
        }
    }
}

/// Runs what needs the settings; the outer error is what is wrong with them.
fn with_settings<T>(arguments: &Arguments, run: impl FnOnce(Loaded) -> T) -> Result<T, Vec<Wrong>> {
    arguments.load_settings().map(run)
}
